"""The architectures that GGUF files are read of: which of ours each is, and what its converter does to tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.models.weights import LAYER

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # configuration

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str  # of the class in Hugging Face's `architectures`
    block: Mapping[str, str] = field(default_factory=lambda: _BLOCK)  # a layer's tensors
    is_interleaved: bool = False  # whether rope turns neighbours in the rows of queries and keys
    norm_shift: float = 0.0  # from norms in the file to those of Hugging Face
    full_attention_each: int | None = None  # of so many layers the last has no window
    default_window: int | None = None  # in tokens
    wide_query_scale_at: int | None = None  # layers of the size whose query scale is not that of its heads


ARCHITECTURES = {
    "llama": Architecture(name="LlamaForCausalLM", is_interleaved=True),  # and Mistral
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM", block=_BLOCK | _QK_NORMS),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        block=_GEMMA,
        norm_shift=-1.0,
        full_attention_each=2,
        default_window=4096,
        wide_query_scale_at=46,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        block=_GEMMA | _QK_NORMS,
        norm_shift=-1.0,
        full_attention_each=6,
        wide_query_scale_at=62,
    ),
    "phi3": Architecture(name="Phi3ForCausalLM", block=_PHI3),
}


def hugging_face_tensor(architecture: Architecture, tensor: StoredTensor) -> tuple[str, StoredTensor] | None:
    """The name that a tensor of the file has in a Hugging Face checkpoint, and the tensor with what makes its values
    the ones there. None for a name that the architecture does not have."""
    stem, _, kind = tensor.name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _TOP:
        name = _TOP[stem]
    else:
        first, _, rest = stem.partition(".")
        layer, _, member = rest.partition(".")
        if first != "blk" or not layer.isdecimal() or member not in architecture.block:
            return None
        name = LAYER.format(i=int(layer)) + architecture.block[member]
        if member in ("attn_q", "attn_k"):
            tensor = tensor._replace(is_interleaved=architecture.is_interleaved)
    if stem.endswith("norm"):
        tensor = tensor._replace(shift=architecture.norm_shift)
    return f"{name}.{kind}", tensor
