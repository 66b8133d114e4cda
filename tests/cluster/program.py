"""What a test runs on each host: `python -m tests.cluster.program '{"index": 0, ...}'` with the options of `OPTIONS`.

The leader writes a line of JSON for all that happens; a follower writes nothing but its log.
"""

import json
import logging
import sys
import threading
import time

OPTIONS = {
    "index": None,  # of the host; None: no group, one device
    "launcher": None,  # that says who is in the group, as in `LLM(cluster="slurm")`, in place of the next three
    "num_hosts": 2,
    "coordinator": "",
    "secret_file": "",
    "engine": {},  # options of `LLM`
    "compiles_all": False,  # in the background, as users' engines do, or what is asked for
    "lacks": [],  # names of executables that can't be compiled here
    "work": "mixed",  # or "few"; "early": these once the leader has compiled all; "endless"; "idle"
}
SIZES = dict(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=16, block_size=8, dtype="float32")
PROMPTS = ["def read_lines(path", "import os\nimport", "class A:\n    def __init__", "for i in range(", "x = [1, 2"]


def mixed(llm) -> list:
    """Samples, beams, a grammar, penalties, prompt log-probabilities, preemption."""
    from jaxllm import SamplingParams, StructuredOutputs

    params = [
        SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.2, logprobs=2),
        SamplingParams(beam_width=3, n=2, temperature=0.0, max_tokens=12),
        SamplingParams(seed=2, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z]{6}[0-9]")),
        SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1),
    ]
    found = []
    for preemption in ("recompute", "swap"):
        llm.engine.set_preemption(preemption)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs += llm.generate(PROMPTS[:4], SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True))
        found += [[list(part.token_ids) for part in output.outputs] for output in outputs]
    return found


def few(llm) -> list:
    from jaxllm import SamplingParams

    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def tell(**fields) -> None:
    print(json.dumps(fields) + "\n", end="", flush=True)  # at once, or another thread's log may come between


def work(llm, kind: str) -> None:
    from jaxllm import SamplingParams

    if kind == "mixed":
        tell(few=few(llm))
        tell(outputs=mixed(llm), preemptions=llm.stats().num_preemptions, swapped=llm.stats().num_swapped)
    elif kind in ("few", "early"):
        plan = llm.engine.runner.compile_plan
        while kind == "early" and len(plan.compiled) < plan.total:
            time.sleep(0.1)
        tell(few=few(llm))
    elif kind == "idle":
        tell(idle=True)
        while True:
            time.sleep(1)
    else:
        while True:
            for _, output in llm.stream(PROMPTS[:2], SamplingParams(max_tokens=64, ignore_eos=True)):
                if len(output.outputs[0].token_ids) == 5:
                    tell(steps=True)


def lacking(names: list) -> None:
    """Lets executables of these names fail to compile."""
    from jaxllm.engine.device.lowering import Lowering

    def fails():
        raise RuntimeError("this compiler has a defect")

    jobs = Lowering.jobs
    unwanted = {tuple(name) if isinstance(name, list) else name for name in names}
    Lowering.jobs = lambda self: {name: fails if name in unwanted else job for name, job in jobs(self).items()}


def main(given: dict) -> None:
    options = OPTIONS | given
    index = options["index"]
    logging.basicConfig(level="INFO", format=f"{index} %(levelname)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    from jaxllm import LLM
    from jaxllm.cluster.options import Cluster
    from tests import on_demand

    if not options["compiles_all"]:
        on_demand.install()
    lacking(options["lacks"])
    cluster = options["launcher"]
    if index is not None:
        group = {name: options[name] for name in ("coordinator", "num_hosts", "secret_file")}
        cluster = Cluster(host_index=index, timeout_s=60, **group)
    threading.excepthook = threading.__excepthook__
    try:
        with LLM(cluster=cluster, **SIZES | options["engine"]) as llm:
            tell(built=True)
            work(llm, options["work"])
        tell(closed=True)
    except Exception as error:  # noqa: BLE001 - the test reads what it is
        tell(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
