"""Completes a few prompts at once."""

from vllm import LLM, SamplingParams

prompts = ["The ship left the harbour at", "My favourite number is", "It rained until"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)


def main():
    llm = LLM(model="facebook/opt-125m")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        generated_text = output.outputs[0].text
        print(f"Prompt: {output.prompt!r}, generated: {generated_text!r}, reason: {output.outputs[0].finish_reason}")


if __name__ == "__main__":
    main()
