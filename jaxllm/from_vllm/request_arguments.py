"""vLLM's fields of `SamplingParams`, and arguments of `generate` and `chat`, that are none of ours."""

from collections.abc import Mapping
from typing import Any, TypedDict

from jaxllm.from_vllm.engine_arguments import NO_LORA, NO_MEDIA
from jaxllm.from_vllm.rules import Hint, Only, Rule, translate, unknown

_ON_DEVICE = "logits are changed on the device, by logit_bias, allowed_token_ids, bad_words and structured_outputs"
_PLUGINS = "they are for plugins, and there are none; leave it out"
_NO_BUDGET = "there is no budget for thinking; max_tokens bounds all of an output"
_ALL_PROMPT = "prompt_logprobs gives the most likely tokens at every place of the prompt"
_NO_REPLAY = "tokens are sampled; to score given ones, put them into the prompt and ask for prompt_logprobs"
_INTERNAL = "it is for vLLM's own use"


def _is_empty(value: object) -> bool:
    return value in (None, [], (), {})


SAMPLING_FIELDS: dict[str, Rule] = {
    "logits_processors": Only(_is_empty, _ON_DEVICE),
    "extra_args": Only(_is_empty, _PLUGINS),
    "thinking_token_budget": Only((None, -1), _NO_BUDGET),
    "repetition_detection": Only((None,), "give repetition_penalty or frequency_penalty"),
    "prompt_logprob_token_ids": Only((None,), _ALL_PROMPT),
    "prompt_logprob_start": Only((None, 0), _ALL_PROMPT),
    "flat_logprobs": Only((None, False), "log-probabilities are dicts, which are made when they are looked at"),
    "routed_experts_prompt_start": Only((None, 0), "which experts took a token is not returned; leave it out"),
    "trace_decode_token_ids": Only((None,), _NO_REPLAY),
    "guided_decoding": Only((None,), "give structured_outputs=StructuredOutputsParams(...), as vLLM has it now"),
    "skip_clone": Hint(_INTERNAL),
    "output_text_buffer_length": Hint(_INTERNAL),
}

POOLING_FIELDS: dict[str, Rule] = {
    "normalize": Only((None,), "its name is use_activation"),
    "activation": Only((None,), "its name is use_activation"),
    "softmax": Only((None,), "its name is use_activation"),
    "step_tag_id": Only((None,), "a prompt has one output; there are none of its tokens yet"),
    "returned_token_ids": Only((None,), "a prompt has one output; there are none of its tokens yet"),
    "requires_token_ids": Hint(_INTERNAL),
    "skip_clone": Hint(_INTERNAL),
    "extra_kwargs": Only(_is_empty, _PLUGINS),
    "output_kind": Hint("a prompt that is pooled has one output"),
    "late_interaction_params": Only((None,), "a prompt has one output; there are none of its tokens yet"),
}

_FORMAT = "give structured_outputs=StructuredOutputsParams({}=...)"
OTHER_SAMPLING_FIELDS = {  # names of transformers, of OpenAI's API and of llama.cpp, and old ones of vLLM
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_length", "n_predict", "num_predict"), "give max_tokens"
    ),
    **dict.fromkeys(("num_beams", "use_beam_search", "num_beam_groups"), "give beam_width, or call llm.beam_search"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "give min_tokens"),
    **dict.fromkeys(("num_return_sequences", "num_generations"), "give n"),
    **dict.fromkeys(("repeat_penalty",), "give repetition_penalty"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "give stop"),
    **dict.fromkeys(("eos_token_id", "stop_ids"), "give stop_token_ids; the model's own end always ends a text"),
    **dict.fromkeys(("suppress_tokens", "bad_words_ids"), "give logit_bias={token_id: -100}, or bad_words"),
    **dict.fromkeys(("top_logprobs", "output_scores"), "give logprobs"),
    **dict.fromkeys(("response_format", "guided_json"), _FORMAT.format("json")),
    **{f"guided_{kind}": _FORMAT.format(kind) for kind in ("regex", "choice", "grammar")},
    **dict.fromkeys(("typical_p", "epsilon_cutoff", "eta_cutoff", "tfs_z", "mirostat"), "give top_p or min_p"),
    "do_sample": "it samples unless temperature=0",
    "greedy": "give temperature=0",
    "pad_token_id": "nothing is padded; leave it out",
    "no_repeat_ngram_size": "give repetition_penalty or frequency_penalty",
    "stream": "call llm.stream, or AsyncLLM.generate",
    "echo": "an output has its prompt: output.prompt",
}

_LORA = Only((None,), NO_LORA)
GENERATE_ARGUMENTS: dict[str, Rule] = {
    "lora_request": _LORA,
    "prompt_adapter_request": Only((None,), "there are no prompt adapters; leave it out"),
    "guided_options_request": Only((None,), "give SamplingParams(structured_outputs=...)"),
    "tokenization_kwargs": Only(
        _is_empty, "give SamplingParams(truncate_prompt_tokens=...), or token ids: {'prompt_token_ids': [...]}"
    ),
    "mm_processor_kwargs": Only(_is_empty, NO_MEDIA),
    "prompt_token_ids": Only((None,), "give the ids as prompts: llm.generate({'prompt_token_ids': [...]})"),
}
PROMPT_KEYS: dict[str, Rule] = {
    "multi_modal_data": Only(_is_empty, NO_MEDIA),
    "multi_modal_uuids": Only(_is_empty, NO_MEDIA),
    "mm_processor_kwargs": Only(_is_empty, NO_MEDIA),
    "prompt_embeds": Only((None,), "prompts are text or token ids"),
    "encoder_prompt": Only((None,), "there are no models with an encoder; give {'prompt': ...}"),
    "decoder_prompt": Only((None,), "there are no models with an encoder; give {'prompt': ...}"),
    "type": Hint("the keys say what it is"),
}
CHAT_ARGUMENTS: dict[str, Rule] = {
    "lora_request": _LORA,
    "mm_processor_kwargs": Only(_is_empty, NO_MEDIA),
    "tokenization_kwargs": GENERATE_ARGUMENTS["tokenization_kwargs"],
    "chat_template_content_format": Only(
        (None, "auto", "string"), "a message reaches the template as one text, its parts joined by line breaks"
    ),
    "reasoning_effort": Only((None,), "give chat_template_kwargs={'reasoning_effort': ...}"),
    "return_assistant_tokens_mask": Only((None, False), "there is none; leave it out"),
}
POOLING_ARGUMENTS: dict[str, Rule] = {
    "lora_request": _LORA,
    "prompt_adapter_request": GENERATE_ARGUMENTS["prompt_adapter_request"],
    "tokenization_kwargs": Only(
        _is_empty, "give PoolingParams(truncate_prompt_tokens=...), or token ids: {'prompt_token_ids': [...]}"
    ),
    "truncate_prompt_tokens": Only((None,), "it is a field of PoolingParams"),
    "truncation_size": Only((None,), "give PoolingParams(truncate_prompt_tokens=...)"),
    "chat_template": Only((None,), "a pair of texts is encoded as the model's tokenizer says"),
}
ADD_REQUEST_ARGUMENTS: dict[str, Rule] = {
    "lora_request": _LORA,
    "tokenization_kwargs": GENERATE_ARGUMENTS["tokenization_kwargs"],
    "prompt_text": Hint("the prompt has its text"),
    "arrival_time": Hint("the engine takes the time when a request comes"),
    "trace_headers": Only(_is_empty, "a server has it: jaxllm serve --otlp-traces-endpoint URL"),
    "data_parallel_rank": Only((None, 0), "an engine is one replica; leave it out"),
}


class VllmGenerateArguments(TypedDict, total=False):
    """What each value means is in `GENERATE_ARGUMENTS`."""

    lora_request: Any
    prompt_adapter_request: Any
    guided_options_request: Any
    tokenization_kwargs: Any
    mm_processor_kwargs: Any
    prompt_token_ids: Any


class VllmChatArguments(TypedDict, total=False):
    """What each value means is in `CHAT_ARGUMENTS`."""

    lora_request: Any
    mm_processor_kwargs: Any
    tokenization_kwargs: Any
    chat_template_content_format: Any
    reasoning_effort: Any
    return_assistant_tokens_mask: Any


class VllmPoolingArguments(TypedDict, total=False):
    """What each value means is in `POOLING_ARGUMENTS`."""

    lora_request: Any
    prompt_adapter_request: Any
    tokenization_kwargs: Any
    truncate_prompt_tokens: Any
    truncation_size: Any
    chat_template: Any


_SAMPLING = "it is a field of SamplingParams: llm.generate(prompts, SamplingParams({}=...))"
_SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "n",
    "seed",
    "logprobs",
)


def check_request_arguments(call: str, vllm: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises `ValueError` for a value that asks for what is not there, `TypeError` for a name of nobody."""
    elsewhere = {name: _SAMPLING.format(name) for name in _SAMPLING_NAMES}
    for name, meant in OTHER_SAMPLING_FIELDS.items():
        elsewhere[name] = f"{meant}, in SamplingParams" if meant.startswith("give") else meant
    for name in vllm:
        if name not in rules:
            raise unknown(call, name, ["prompts", "sampling_params", "priority", "use_tqdm", *rules], elsewhere)
    translate(call, vllm, rules)
