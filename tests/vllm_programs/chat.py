"""Talks to a model: one conversation, several at once, and one with parameters of the model's own."""

from vllm import LLM, SamplingParams


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Answer: {output.outputs[0].text!r}")


def main():
    llm = LLM(model="facebook/opt-125m")
    params = llm.get_default_sampling_params()
    print(f"Recommended: temperature {params.temperature}, at most {params.max_tokens} tokens")
    conversation = [
        {"role": "system", "content": "You help with letters."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! What shall we write?"},
        {"role": "user", "content": [{"type": "text", "text": "A letter to my landlord."}]},
    ]
    print_outputs(llm.chat(conversation, SamplingParams(temperature=0.5, max_tokens=8), use_tqdm=False))
    print_outputs(llm.chat([conversation, conversation[1:2]], sampling_params=params, use_tqdm=True))

    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation[1:2], tokenize=False, add_generation_prompt=True)
    print(f"By hand: {text!r}")


if __name__ == "__main__":
    main()
