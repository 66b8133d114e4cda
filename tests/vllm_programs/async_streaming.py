"""Streams the text of several requests while all of them run."""

import asyncio

from vllm import AsyncLLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


async def stream_response(engine, prompt, request_id):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    text, num_tokens = "", 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            text += completion.text
            num_tokens += len(completion.token_ids)
        if output.finished:
            print(f"{request_id}: {num_tokens} tokens, {text!r}")


async def main():
    engine = AsyncLLM(model="facebook/opt-125m", max_model_len=128)
    prompts = ["The future is", "In a small town", "The key to"]
    await asyncio.gather(*(stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)))


if __name__ == "__main__":
    asyncio.run(main())
