"""Random checkpoints, served by the engine, say what transformers says: logits and 64 greedy tokens."""

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.engine.device.executor import Executor
from tests.hf_models import LLAMA3, LONGROPE, YARN, checkpoint, logits
from tests.seldom import all_but
from tests.tiny import TIE, NoText, greedy, ids

pytest.importorskip("torch")
PROMPTS = [[7], [3, 14, 15, 92, 65, 35], np.random.default_rng(0).integers(2, 160, 37).tolist()]


def watch_logits(llm: LLM, monkeypatch) -> list[np.ndarray]:
    """The logits of every row that the engine samples from now on, by the executable that the full sampler runs."""
    seen = []
    apply = Executor.apply

    def watched(self, commands):
        results = []
        for command in commands:
            name, arrays, *_ = command
            if name[0] == "sample":
                seen.append(np.asarray(self.compile_plan["logits", name[1]](self._head, self.state.hidden, *arrays)))
            results += apply(self, [command])
        return results

    monkeypatch.setattr(Executor, "apply", watched)
    return seen


LOCAL = {"sliding_window": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PHI4 = {"partial_rotary_factor": 0.75, "head_dim": 16, "hidden_size": 64}
CASES = {
    "llama": ("Llama", {}, {}),
    "llama_tied_mqa": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_theta": 500.0}, {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "head_dim": 12}, {}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}, {}),
    "llama_yarn_biases": ("Llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}, {}),
    "llama_dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, {}),  # used to 101
    "qwen3": ("Qwen3", {}, {}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3}, {}),
    "mistral": ("Mistral", LOCAL, {}),
    "qwen2": ("Qwen2", LOCAL | {"use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True}, {}),
    "gemma2": ("Gemma2", {}, {}),
    "gemma3": ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
    "opt": ("OPT", {}, {}),
    "opt_350m": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, {}),
    "phi3": ("Phi3", LOCAL, {}),
    "phi4_mini": ("Phi3", PHI4 | {"num_key_value_heads": 2, "tie_word_embeddings": True}, {}),
    # transformers chooses by the sequence at hand, so the sequences here lie on one side of the original length.
    "phi3_long": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, {}),
    "phi3_short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, {"num_blocks": 16}),
    "mixtral": ("Mixtral", LOCAL, {}),
    "qwen2_moe": ("Qwen2Moe", {}, {}),
    "qwen3_moe": ("Qwen3Moe", {}, {}),
    "olmoe": ("Olmoe", {}, {}),
    "gpt_oss": ("GptOss", {}, {}),
    "glm4_moe": ("Glm4Moe", {}, {}),
    "minimax_m2": ("MiniMaxM2", {}, {}),
    "granite_moe": ("GraniteMoe", {"attention_bias": True}, {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {}, {}),
    "llama4": ("Llama4", {}, {}),
}


OFTEN = ("llama", "llama_llama3", "qwen3_tied", "qwen2", "gemma3", "opt", "phi3", "gpt_oss", "llama4")


@pytest.mark.parametrize("case", all_but(OFTEN, CASES))
def test_engine_equals_transformers(tmp_path, monkeypatch, case):
    family, changes, changed_options = CASES[case]
    theirs = checkpoint(tmp_path, family, seed=len(case), **changes)
    options = dict(tokenizer=NoText(), max_num_seqs=2, max_num_batched_tokens=8, block_size=8, num_blocks=48)
    with LLM(tmp_path, **(options | changed_options)) as llm:
        for prompt in PROMPTS:
            with monkeypatch.context() as patch:
                seen = watch_logits(llm, patch)
                (out,) = llm.generate(ids(prompt), greedy(64))
            output = out.outputs[0].token_ids
            assert len(output) == 64
            cached_from = 63 if case == "llama_dynamic" else None  # within its original length
            want = logits(theirs, prompt + output, cached_from=cached_from)[len(prompt) - 1 : -1]
            got = np.stack([rows[0] for rows in seen[:64]])
            scale = np.abs(want).max()
            assert np.abs(got - want).max() <= 1e-4 * scale
            lost = want.max(axis=-1) - want[np.arange(64), output]  # greedy, but for ties
            assert lost.max() <= TIE * scale
