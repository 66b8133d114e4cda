"""Greedy tokens of vLLM, in an environment of its own, for a benchmark in another: `PYTHON vllm_peer.py MODEL DTYPE`.

Takes lines of JSON, `{"prompts": [[...], ...], "output_len": n}`, and answers each with the tokens of each prompt."""

import json
import os
import sys


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    model, dtype = sys.argv[1:]
    options = {"max_model_len": 512, "max_num_seqs": 64, "enable_prefix_caching": False, "disable_log_stats": True}
    llm = LLM(model=model, dtype=dtype, skip_tokenizer_init=True, **options)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["output_len"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
