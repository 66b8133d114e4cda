"""Prints how likely a model finds its prompt and what it says."""

import math

from vllm import LLM, SamplingParams


def show(title, position):
    for token_id, logprob in position.items():
        print(f"{title}: {logprob.decoded_token!r} ({token_id}), rank {logprob.rank}: {math.exp(logprob.logprob):.1%}")


def main():
    llm = LLM(model="facebook/opt-125m")
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(["Good morning"], params, use_tqdm=False)
    assert output.prompt_logprobs[0] is None  # nothing comes before the first token
    for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token_id in position
        show("prompt", position)
    completion = output.outputs[0]
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token_id].rank == 1
        total += position[token_id].logprob
        show("output", position)
    assert abs(total - completion.cumulative_logprob) < 1e-3
    print(f"all of the output: {total:.2f} nats")


if __name__ == "__main__":
    main()
