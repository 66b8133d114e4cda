"""The engine's process with an engine that is none: `engine_process` as it is, but for `build_engine`.

Every request gets the letters of the alphabet, one a step. What its first token id is can happen to it: 1 is refused,
2 kills the process's engine, 3 makes a step that takes long, 4 fails alone, 5 waits for a compilation, 6 is a bug when
it comes in, 7 makes the process say what can't be read.
"""

import os
import sys
import time
import types
from dataclasses import dataclass, field, replace

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.engine import engine_process
from tests.fake_server import CONFIG, STATS

STEP_S = 0.01
REFUSED, DEADLY, SLOW, POISON, COMPILING, BUG, GARBLED = 1, 2, 3, 4, 5, 6, 7

MODES = []  # of the socket's folder and the socket, while it can still be seen


@dataclass
class FakeEngine:
    config = CONFIG
    vocab = 4096
    requests: dict = field(default_factory=dict)  # id -> [params, tokens so far, prompt]
    is_sleeping = False

    def __post_init__(self):
        self.compile_plan = types.SimpleNamespace(waited_at=0.0)
        self.runner = types.SimpleNamespace(compile_plan=self.compile_plan)
        self.pool = types.SimpleNamespace(num_forgotten=0, forget_keys=self.forget_keys)
        self.scheduler = types.SimpleNamespace(check=lambda: None, pool=self.pool, forget_keys=self.forget_keys)
        grammars = types.SimpleNamespace(warm_up=self.warm_up)
        pooling = types.SimpleNamespace(lowercase=False)
        pooler = types.SimpleNamespace(task="embed", width=1, labels=(), config=pooling)
        self.intake = types.SimpleNamespace(grammars=grammars, pooler=pooler)

    def forget_keys(self):
        self.pool.num_forgotten += 1

    def sleep(self, level):
        if self.requests:
            raise ValueError("1 requests run")
        if self.pool.num_forgotten > 2:
            raise RuntimeError("a bug")
        self.is_sleeping = True

    def wake_up(self, tags):
        self.is_sleeping = tags == ["weights"]

    def has_work(self):
        return bool(self.requests)

    @property
    def may_step(self):
        return self.has_work()

    def stats(self):
        if any(token_ids[0] == GARBLED for _, _, token_ids in list(self.requests.values())):
            return "nonsense"
        return replace(STATS, num_running=len(self.requests), blocks_used=len(self.requests))

    def warm_up(self):
        raise ValueError("there is no tokenizer")

    def prepare(self, token_ids, params, *, prompt=None):
        match params.structured_outputs and params.structured_outputs.regex:
            case "slow":
                time.sleep(2)
            case "bad":
                raise ValueError("the grammar is not sound")
            case "broken":
                raise RuntimeError("a bug")
        if token_ids[0] == REFUSED:
            raise ValueError("there is no place for this")
        return token_ids, params

    def submit(self, prepared, *, request_id, priority, stream, lean):
        token_ids, params = prepared
        assert stream and lean
        if token_ids[0] == BUG:
            raise TypeError("a bug")
        self.requests[request_id] = [params, 0, token_ids]

    def drop(self, request_id):
        self.requests.pop(request_id, None)

    def abort(self, request_id):
        if (request := self.requests.pop(request_id, None)) is None:
            return None
        return self._output(request_id, request, "", "abort")

    def step(self):
        time.sleep(STEP_S)
        kinds = {token_ids[0] for _, _, token_ids in self.requests.values()}
        if DEADLY in kinds:
            raise RuntimeError("the device is gone")
        if SLOW in kinds:
            time.sleep(3)
        if COMPILING in kinds:
            for _ in range(30):
                time.sleep(0.1)
                self.compile_plan.waited_at = time.monotonic()
        news = []
        for request_id, request in list(self.requests.items()):
            params, count, token_ids = request
            request[1] += 1
            reason = "length" if request[1] == params.max_tokens else None
            if token_ids[0] == POISON:
                reason = "error"
            news.append(self._output(request_id, request, chr(97 + count % 26), reason))
            if reason is not None:
                del self.requests[request_id]
        return news

    def _output(self, request_id, request, text, reason):
        token_ids = request[2]
        scores = [None] * len(token_ids) if request[0].prompt_logprobs and request[1] == 1 else None
        piece = CompletionOutput(index=0, text=text, token_ids=[97] * len(text), finish_reason=reason)
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=[],
            prompt_logprobs=scores,
            outputs=[piece],
            finished=reason is not None,
            error="it failed" if reason == "error" else None,
        )


def build_engine(**options):
    if path := options.get("told"):
        with open(path, "w") as file:
            file.write(" ".join(MODES))
    if options.get("wrong"):
        raise ValueError("max_model_len=0 is no length")
    time.sleep(options.get("load_s", 0))
    return FakeEngine()


def install() -> None:
    sys.modules["jaxllm.engine.build"] = types.SimpleNamespace(build_engine=build_engine)
    sys.modules["jaxllm.cli.common"] = types.SimpleNamespace(
        setup_compilation_cache=lambda: None, setup_device_memory=lambda share: None
    )


if __name__ == "__main__":
    install()
    MODES += [oct(os.stat(place).st_mode & 0o777) for place in (os.path.dirname(sys.argv[1]), sys.argv[1])]
    os._exit(engine_process.main(sys.argv[1]))
