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
_MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}  # stacked
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
    mixture: str | None = None  # the class's name where there are experts
    renormalises: bool = False  # the weights of a token's experts, where the file does not say
    wide_query_scale_at: int | None = None  # layers of the size whose query scale is not that of its heads


ARCHITECTURES = {
    "llama": Architecture(  # and Mistral, Mixtral
        name="LlamaForCausalLM", block=_BLOCK | _MIXTURE, is_interleaved=True, mixture="MixtralForCausalLM"
    ),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen2moe": Architecture(name="Qwen2MoeForCausalLM", block=_BLOCK | _MIXTURE, mixture="Qwen2MoeForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM", block=_BLOCK | _QK_NORMS),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        block=_BLOCK | _QK_NORMS | _MIXTURE,
        mixture="Qwen3MoeForCausalLM",
        renormalises=True,
    ),
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
MODEL_TYPES = {  # Hugging Face's, by the class
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
}


def hugging_face_tensors(architecture: Architecture, tensor: StoredTensor) -> dict[str, StoredTensor]:
    """The names that a tensor of the file has in a Hugging Face checkpoint, several where it stacks those of experts,
    and the tensors with what makes their values the ones there. Empty for a name that the architecture does not
    have."""
    stem, _, kind = tensor.name.rpartition(".")
    if kind not in ("weight", "bias"):
        return {}
    if stem in _TOP:
        return {f"{_TOP[stem]}.{kind}": _shifted(architecture, tensor, stem)}
    first, _, rest = stem.partition(".")
    layer, _, member = rest.partition(".")
    if first != "blk" or not layer.isdecimal():
        return {}
    prefix = LAYER.format(i=int(layer))
    if member in _EXPERTS and architecture.mixture and kind == "weight" and len(tensor.shape) == 3:
        size, shape = tensor.row_bytes, tensor.shape[1:]
        return {
            f"{prefix}mlp.experts.{e}.{_EXPERTS[member]}.weight": tensor._replace(
                shape=shape, offset=tensor.offset + e * size
            )
            for e in range(tensor.shape[0])
        }
    if member not in architecture.block:
        return {}
    if member in ("attn_q", "attn_k"):
        tensor = tensor._replace(is_interleaved=architecture.is_interleaved)
    if member == "ffn_gate_inp_shexp":
        tensor = tensor._replace(shape=(1, *tensor.shape[-1:]))  # in files a vector
    return {f"{prefix}{architecture.block[member]}.{kind}": _shifted(architecture, tensor, stem)}


def _shifted(architecture: Architecture, tensor: StoredTensor, stem: str) -> StoredTensor:
    return tensor._replace(shift=architecture.norm_shift) if stem.endswith("norm") else tensor
