"""What models are whose architecture is not supported: a table of kinds, and of models nearby that are supported."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class ModelKind(NamedTuple):
    """Models that are refused for one reason."""

    what: str  # "X is ..."
    names: str  # what the names of their architectures and their model types match, in lower case without punctuation
    keys: tuple[str, ...] = ()  # of `config.json`, which models of this kind alone have
    remedy: str = "take a text model"
    nearest: str | None = None  # a model to take; None: one that generates, of a family nearby


# Mixtures of experts that are supported.
_MIXTURES = (
    r"(mixtral|(qwen[23]|granite|glm4|ernie45)moe|olmoe|gptoss|minimaxm2|llama4text)(for|model|$)|llama4forcausal"
)

# The first that matches is taken.
KINDS = (
    ModelKind(
        "scores or labels texts (a classifier or a reward model), and its kind of layers or head is not supported",
        r"for(sequence|token|text)classification|forquestionanswering|formultiplechoice|fornextsentence"
        r"|reward|forretrieval|crossencoder",
        remedy="take one of BERT, RoBERTa, XLM-RoBERTa or ModernBERT, or a decoder with one linear head",
        nearest="BAAI/bge-reranker-v2-m3",
    ),
    ModelKind(
        "reads or makes speech or other sound; only text models are supported",
        r"whisper|wav2vec|wavlm|hubert|unispeech|speech|audio|asr|voxtral|moshi|music|seamless|parakeet|moonshine"
        r"|canary|vibevoice|forctc|spectrogram|waveform|^csm|^bark|^dia(for|$)",
        keys=("audio_config",),
    ),
    ModelKind(
        "is an encoder-decoder, whose decoder looks at an encoded text; only decoders alone are supported",
        r"^(|m|um|by|long|flan)t5|t5gemma|^m?bart|^plbart|pegasus|marian|^m2m|nllb|^fsmt|^led(for|$)|prophetnet"
        r"|^blenderbot|switchtransformers|encoderdecoder|^mvp",
        remedy="take a decoder",
    ),
    ModelKind(
        "reads images beside text; only text models are supported",
        r"vl(\d|m|v|hybrid|moe|text|chat|for|$)|vision|visual|llava|mllama|llama4for(cond|$)|llama4$|idefics|paligemma"
        r"|gemma(3n?|[4-9])(unified)?(forcond|$)|mistral3|pixtral|molmo|ovis|omni|ocr|phi3v|phi4mm|fuyu|blip|kosmos"
        r"|florence|janus|chameleon|emu3|multimodal|minicpm[vo]|cogvlm|glm4\d?v|kimik25|^aria|^clip|siglip|^vit|perceptionlm"
        r"|image|docling|pix2struct",
        keys=("vision_config", "vision_tower"),
    ),
    ModelKind(
        "is a mixture of experts with multi-head latent attention (kv_lora_rank), which is not supported yet",
        r"deepseekv[23]|kimi(?!linear)|longcat|glm4moelite|glmmoedsa",
        keys=("kv_lora_rank",),
        remedy="take a dense model",
    ),
    ModelKind(
        "is a mixture of experts whose router compares scores within router_jitter_noise (sparsemixer), which is not "
        "supported",
        r"phi(3?5?)moe",
        remedy="take a dense model",
    ),
    ModelKind(
        "is a mixture of experts of a family that is not supported",
        rf"^(?!{_MIXTURES})(?=.*(moe|mixtral|gptoss|deepseekv|^dbrx|grok|arctic|jamba|llama4|qwen3next|qwen35moe|minimax"
        r"|dots1|^hunyuan.*a13b|bailing|mimov2|hyv3|solaropen|laguna|kimilinear))",
        keys=("num_experts", "num_local_experts", "n_routed_experts"),
        remedy="take a dense model",
    ),
    ModelKind(
        "is recurrent in some or all of its layers (a state-space model, or linear attention), which is not supported",
        r"mamba|rwkv|recurrentgemma|griffin|zamba|bamba|falconh1|nemotronh|lfm\d|xlstm|plamo2|kimilinear|qwen35|"
        r"olmohybrid|granitemoehybrid|retnet|hyena|minimaxtext",
        remedy="take a transformer",
    ),
    ModelKind(
        "is an encoder: it embeds texts or fills gaps in them, and is not supported in this form",
        r"bert|formaskedlm|electra|ernie(for|$|model)|^mpnet|^fnet|^xlmfor|xlmroberta|longformer|bigbird(for|$|model)"
        r"|^luke|roformer|flaubert|^esm|^gtefor|gtemodel|jinaembeddings|^funnel|nystromformer|squeezebert|layoutlm",
        remedy="take a BERT, RoBERTa, XLM-RoBERTa or ModernBERT in Hugging Face format",
        nearest="BAAI/bge-m3",
    ),
    ModelKind(
        "makes hidden states (an embedding model, say) and has no head; its family is not supported",
        r"(?<!head)model$|embedding",
        remedy="take an embedding model of a family that is",
        nearest="Qwen/Qwen3-Embedding-0.6B",
    ),
)

# The first whose families match, and what of theirs is served.
_NEAREST = (
    (r"smol|idefics3", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    (r"deepseek", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    (r"qwen|internvl", "Qwen/Qwen3-4B"),
    (r"gemma", "google/gemma-3-1b-it"),
    (r"m[ai]xtral|mistral|ministral|pixtral|voxtral", "mistralai/Mistral-7B-Instruct-v0.3"),
    (r"^phi", "microsoft/Phi-4-mini-instruct"),
    (r"llama|llava", "meta-llama/Llama-3.1-8B-Instruct"),
    (r"", "Qwen/Qwen3-0.6B"),
)


def describe(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """What a model is, by the first of its names (of architectures or model types) that tells, or else the keys of its
    `config.json`, and what to take in its place. None where nothing tells."""
    names = list(names)
    for name in names:
        plain = _plain(name)
        for kind in KINDS:
            if re.search(kind.names, plain):
                return _say(name, kind)
    for kind in KINDS:
        if names and any(config.get(key) for key in kind.keys):
            return _say(names[0], kind)
    return None


def _say(name: str, kind: ModelKind) -> str:
    plain = _plain(name)
    nearest = kind.nearest or next(model for family, model in _NEAREST if re.search(family, plain))
    return f"{name} {kind.what}; {kind.remedy}, such as {nearest}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
