"""Random checkpoints, served by the engine, say what transformers says: logits and 64 greedy tokens."""

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.engine.runner import Runner
from tests.tiny import TIE, greedy, ids

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 80, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
PROMPTS = [[7], [3, 14, 15, 92, 65, 35], np.random.default_rng(0).integers(2, 160, 37).tolist()]


def checkpoint(path, family: str, seed: int, **changes):
    """Saves a random model as transformers does, and returns it."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


def watch_logits(llm: LLM, monkeypatch) -> list[np.ndarray]:
    """The logits of every row that the engine samples from now on."""
    seen = []
    dispatch = Runner.dispatch

    def watched(self, plan):
        plan_of = self.compile_plan

        class Plan:
            ready = plan_of.ready

            def __getitem__(self, name):
                run = plan_of[name]
                if name[0] != "sample":
                    return run
                return lambda last, length, table, logits, slots: (
                    seen.append(np.asarray(logits)) or run(last, length, table, logits, slots)
                )

        with monkeypatch.context() as patch:
            patch.setattr(self, "compile_plan", Plan())
            return dispatch(self, plan)

    monkeypatch.setattr(Runner, "dispatch", watched)
    return seen


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_theta": 500.0}),
        ("Llama", {"num_key_value_heads": 4, "head_dim": 12}),
        ("Qwen3", {}),
        ("Qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ],
)
def test_engine_equals_transformers(tmp_path, monkeypatch, family, changes):
    theirs = checkpoint(tmp_path, family, seed=len(str(changes)), **changes)
    options = dict(tokenizer=NoText(), max_num_seqs=2, max_num_batched_tokens=8, block_size=8, num_blocks=48)
    with LLM(tmp_path, **options) as llm:
        for prompt in PROMPTS:
            with monkeypatch.context() as patch:
                seen = watch_logits(llm, patch)
                (out,) = llm.generate(ids(prompt), greedy(64))
            output = out.outputs[0].token_ids
            assert len(output) == 64
            with torch.no_grad():
                want = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].numpy()
            got = np.stack([rows[0] for rows in seen[:64]])
            scale = np.abs(want).max()
            assert np.abs(got - want).max() <= 1e-4 * scale
            lost = want.max(axis=-1) - want[np.arange(64), output]  # greedy, but for ties
            assert lost.max() <= TIE * scale


class NoText:
    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return ""
