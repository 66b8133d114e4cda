"""Prompts with the same beginning: with and without the cache they give the same text."""

from vllm import LLM, SamplingParams

prefix = "You are the clerk of a small railway station, patient and exact. Answer the traveller. Traveller: "
questions = ["When does the last train leave?", "Is there a waiting room?", "May I bring my dog?"]
prompts = [prefix + question for question in questions]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)


def main():
    regular_llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    regular = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
    del regular_llm

    cached_llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True)
    cached_llm.generate(prompts[0], sampling_params)  # computes the beginning
    outputs = cached_llm.generate(prompts, sampling_params)
    print(f"Cached tokens: {[output.num_cached_tokens for output in outputs]}")
    print(f"Same text: {[output.outputs[0].text for output in outputs] == regular}")


if __name__ == "__main__":
    main()
