"""SmolLM2-135M-Instruct: where `.ci/real_files` puts it, and what it is asked."""

SMOLLM2 = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at",
    "import numpy as np\n\nx = np.",
    "The three laws of thermodynamics are:\n1.",
    "Dear Sir or Madam,\n\n",
    "Q: What is 7 times 8?\nA:",
    "Die Hauptstadt von Deutschland ist",
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "List three fruits.",
    "What is 12 + 30?",
    "Who wrote Hamlet?",
    "Give me a synonym of 'happy'.",
    "Is a tomato a fruit or a vegetable?",
)
CHATS = (
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "Where are you going?"},
        {"role": "assistant", "content": "To the islands, arr!"},
        {"role": "user", "content": "And what will you do there?"},
    ],
)
TURNS = (
    "Tell me something about the moon.",
    "How far away is it?",
    "Who was the first to walk on it?",
    "And in which year?",
)
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 100000000},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "country", "population", "is_capital"],
    "additionalProperties": False,
}
