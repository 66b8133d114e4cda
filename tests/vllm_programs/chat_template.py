"""Talks to a model with another chat template than its own, and lets it finish a sentence."""

from vllm import LLM, SamplingParams

TEMPLATE_FILE = "plain_template.jinja"


def main():
    llm = LLM(model="facebook/opt-125m")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with open(TEMPLATE_FILE) as file:
        chat_template = file.read()
    conversation = [{"role": "user", "content": "Name a colour."}]
    (output,) = llm.chat(conversation, params, chat_template=chat_template, use_tqdm=False)
    print(f"Prompt: {output.prompt!r}")

    conversation.append({"role": "assistant", "content": "My answer is"})
    (output,) = llm.chat(
        conversation,
        params,
        chat_template=chat_template,
        add_generation_prompt=False,
        continue_final_message=True,
        use_tqdm=False,
    )
    print(f"Prompt: {output.prompt!r}")


if __name__ == "__main__":
    main()
