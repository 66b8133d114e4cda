"""The same seed gives the same text, however many neighbours a request has."""

import random

from vllm import LLM, SamplingParams

PROMPT = "Once upon a time"


def main():
    llm = LLM(model="facebook/opt-125m")
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=16)
    (alone,) = llm.generate(PROMPT, seeded, use_tqdm=False)

    neighbours = ["".join(random.choices("abc ", k=random.randint(1, 30))) for _ in range(10)]
    params = [seeded] + [SamplingParams(temperature=1.0, max_tokens=16) for _ in neighbours]
    among_others = llm.generate([PROMPT] + neighbours, params, use_tqdm=False)[0]
    assert list(alone.outputs[0].token_ids) == list(among_others.outputs[0].token_ids)
    print("The same, alone and among others.")


if __name__ == "__main__":
    main()
