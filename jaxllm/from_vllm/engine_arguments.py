"""vLLM's engine arguments that are none of `LLM`'s: what each of their values means here."""

from collections.abc import Mapping
from typing import Any

from jaxllm.from_vllm.rules import Hint, Only, Renamed, Rule, translate, unknown

_OFF = (None, False)
_EMPTY = (None, "", False)
_COMPILED = "every step is compiled ahead of time, for fixed sizes; there is neither an eager mode nor a CUDA graph"
_ONE_PROCESS = "one process drives all its devices, and XLA does what they say to each other"
_KERNELS = "kernels are chosen for the device and the model's shapes"
_CODE = "code in a checkpoint is never run; a model that needs it is refused by name"
_LOADING = "a detail of how vLLM loads weights"
_NO_PARALLEL = "a model is split by tensors only; give tensor_parallel_size, or mesh='tensor=4'"
_DATA = "shards of data are an axis of the mesh; give mesh='data=2', or mesh='data=2,tensor=4'"
_NO_REPLICAS = (
    "an engine is one replica; start one for each part of the devices, and a server for each behind a balancer"
)
_EXPERTS = "the devices that share experts are an axis of the mesh; give mesh='expert=8' for tensor_parallel_size=8"
_NO_EXPERT_MOVES = "experts stay on the devices that they are loaded to; leave it out"
NO_LORA = "there are no LoRA adapters yet; merge the adapter into the weights (peft: merge_and_unload) and serve those"
NO_MEDIA = "only text is served: there are no images, sounds or videos yet; leave it out"
_BY_FILES = "what a model does is what its files say, and any that generates makes embeddings too; leave it out"
_NO_QUANTIZATION = (
    "how weights are quantized is what the checkpoint's files say; for dense ones give quantization='int8', 'int4' or "
    "'fp8'"
)
_NO_SKIPPING = "all layers keep keys and values alike; leave it out, or kv_cache_dtype 'auto'"
_OWN_STATES = "states of recurrences are kept in the dtype that the model computes them in; leave it 'auto'"
_NO_SPECULATION = "there is no speculative decoding yet; leave it out, the text is the same"
_NO_TRANSFER = "keys and values stay in this process; leave it out"
_NO_OFFLOAD = "parameters stay on the devices; use more of them (mesh='tensor=4'), or a smaller dtype"
_NO_PLUGINS = "no code is loaded by its name; leave it out"
_TRACES = "a server has it: jaxllm serve --otlp-traces-endpoint URL"
_SERVER = "that is for a server: jaxllm serve has it under the same name"

_HINTS: dict[str, tuple[str, ...]] = {  # why they change nothing -> names
    _COMPILED: (
        *("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        *("cuda_graph_sizes", "max_seq_len_to_capture", "optimization_level", "performance_mode"),
    ),
    _ONE_PROCESS: (
        *("distributed_executor_backend", "disable_custom_all_reduce", "distributed_timeout_seconds", "master_addr"),
        *("master_port", "ray_workers_use_nsight", "worker_use_ray", "numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
        *("disable_nccl_for_dp_synchronization", "all2all_backend", "data_parallel_backend", "dcp_comm_backend"),
        *("data_parallel_address", "data_parallel_rpc_port", "mm_tensor_ipc"),
    ),
    _KERNELS: (
        *("attention_backend", "attention_config", "kernel_config", "mamba_config", "mamba_backend", "moe_backend"),
        *("linear_backend", "enable_flashinfer_autotune", "ir_op_priority", "gdn_prefill_backend"),
        *("disable_cascade_attn", "mamba_cache_mode", "mamba_block_size", "kv_sharing_fast_prefill"),
        *("use_v2_block_manager", "disable_hybrid_kv_cache_manager", "prefix_caching_hash_algo"),
    ),
    _CODE: ("trust_remote_code", "code_revision"),
    _LOADING: (
        *("use_tqdm_on_load", "safetensors_load_strategy", "pt_load_map_location", "ignore_patterns"),
        *("max_parallel_loading_workers", "fail_on_environ_validation"),
    ),
    "statistics are always kept, cost nothing and are printed only when asked for": (
        *("disable_log_stats", "disable_log_requests", "enable_log_requests", "aggregate_engine_logging"),
        *("show_hidden_metrics_for_version", "enable_logging_iteration_details", "disable_async_output_proc"),
    ),
    "the host always plans a step while the device computes the one before it": ("async_scheduling",),
    "requests run by their priority, and in the order they came where it is equal": (
        *("scheduling_policy", "scheduler_reserve_full_isl"),
    ),
    "LLM.sleep always works": ("enable_sleep_mode",),
    "it says how something is done that is refused itself": (
        *("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "enable_ep_weight_filter", "ubatch_size"),
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "eplb_config", "expert_placement_strategy"),
        *(
            "eplb_window_size",
            "eplb_step_interval",
            "eplb_log_balancedness",
            "offload_backend",
            "kv_offloading_backend",
        ),
        *("offload_num_in_group", "offload_prefetch_step", "allow_deprecated_quantization", "kv_cache_metrics_sample"),
        *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
        *("enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds"),
        *("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "fully_sharded_loras", "lora_extra_vocab_size"),
        *("lora_target_modules", "specialize_active_lora", "enable_tower_connector_lora"),
    ),
    "only text is served": (
        *("language_model_only", "mm_processor_cache_gb", "mm_processor_cache_type", "disable_mm_preprocessor_cache"),
        *("mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
        *("skip_mm_profiling", "disable_chunked_mm_input", "interleave_mm_strings", "renderer_num_workers"),
    ),
    "texts are turned to tokens in the caller's thread": (
        *("tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config"),
    ),
    "closing aborts what is left, and waits for nothing": ("shutdown_timeout",),
}


def _is_guidance(value: Any) -> bool:
    return value in (None, "auto", "guidance", "llguidance")


def _is_plain_format_config(value: Any) -> bool:
    """Whether vLLM's `structured_outputs_config` asks for what is so."""
    if value is None:
        return True
    options = value if isinstance(value, Mapping) else getattr(value, "__dict__", {"": value})
    others = {name: option for name, option in options.items() if name != "backend"}
    return _is_guidance(options.get("backend")) and not any(others.values())


def _is_no_media(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and not any(value.values()))


def _is_nothing(value: Any) -> bool:
    return not value


def _is_zero(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value == 0)


def _is_one(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == 1)


_ONLY: dict[str, Only] = {
    "tokenizer_mode": Only(
        (None, "auto", "hf", "fast"),
        "tokenizers are read from tokenizer.json, or from a GGUF file; jaxllm convert makes one of a slow tokenizer",
    ),
    "config_format": Only(
        (None, "auto", "hf"), "configurations are config.json's, or a GGUF file's; convert the model"
    ),
    "hf_config_path": Only((None,), "the configuration is the model directory's; put it there, or give hf_overrides"),
    "tokenizer_revision": Only(
        (None, "main"), "give tokenizer=DIR with a directory of that revision, or revision for model and tokenizer"
    ),
    "hf_token": Only(
        (None, True), "the hub's own login is used; set the environment variable HF_TOKEN, or hf auth login"
    ),
    "model_impl": Only((None, "auto", "vllm"), "jaxllm has its own models only; leave it 'auto'"),
    "runner": Only((None, "auto", "generate", "pooling"), _BY_FILES),
    "convert": Only((None, "auto", "none", "embed"), _BY_FILES),
    "pooler_config": Only((None,), _BY_FILES),
    "override_pooler_config": Only((None,), _BY_FILES),
    "enable_prompt_embeds": Only(_OFF, "prompts are text or token ids; leave it out"),
    "served_model_name": Only((None,), _SERVER),
    "allowed_local_media_path": Only(_EMPTY, NO_MEDIA),
    "allowed_media_domains": Only(_is_nothing, NO_MEDIA),
    "media_io_kwargs": Only(_is_nothing, NO_MEDIA),
    "limit_mm_per_prompt": Only(_is_no_media, NO_MEDIA),
    "mm_processor_kwargs": Only(_is_nothing, NO_MEDIA),
    "enable_mm_embeds": Only(_OFF, NO_MEDIA),
    "mm_encoder_only": Only(_OFF, NO_MEDIA),
    "video_pruning_rate": Only(_is_zero, NO_MEDIA),
    "enable_mm_processor_stats": Only(_OFF, NO_MEDIA),
    "pipeline_parallel_size": Only(_is_one, _NO_PARALLEL),
    "prefill_context_parallel_size": Only(_is_one, _NO_PARALLEL),
    "decode_context_parallel_size": Only(_is_one, _NO_PARALLEL),
    "data_parallel_size": Only(_is_one, _DATA),
    "data_parallel_size_local": Only(_is_one, _NO_REPLICAS),
    "data_parallel_rank": Only(_is_zero, _NO_REPLICAS),
    "data_parallel_start_rank": Only(_is_zero, _NO_REPLICAS),
    "data_parallel_hybrid_lb": Only(_OFF, _NO_REPLICAS),
    "data_parallel_external_lb": Only(_OFF, _NO_REPLICAS),
    "nnodes": Only(_is_one, "an engine is of one machine; use its devices: mesh='tensor=4'"),
    "node_rank": Only(_is_zero, "an engine is of one machine; use its devices: mesh='tensor=4'"),
    "enable_expert_parallel": Only(_OFF, _EXPERTS),
    "enable_eplb": Only(_OFF, _NO_EXPERT_MOVES),
    "enable_elastic_ep": Only(_OFF, _NO_EXPERT_MOVES),
    "enable_dbo": Only(_OFF, "a step is one batch; leave it out"),
    "num_redundant_experts": Only(_is_zero, _NO_EXPERT_MOVES),
    "quantization_config": Only((None,), _NO_QUANTIZATION),
    "kv_cache_dtype_skip_layers": Only(_is_nothing, _NO_SKIPPING),
    "mamba_cache_dtype": Only((None, "auto"), _OWN_STATES),
    "mamba_ssm_cache_dtype": Only((None, "auto"), _OWN_STATES),
    "override_attention_dtype": Only((None,), "attention is computed in the model's dtype; leave it out"),
    "cpu_offload_gb": Only(_is_zero, _NO_OFFLOAD),
    "cpu_offload_params": Only(_is_nothing, _NO_OFFLOAD),
    "offload_params": Only(_is_nothing, _NO_OFFLOAD),
    "offload_group_size": Only(_is_zero, _NO_OFFLOAD),
    "kv_offloading_size": Only(_is_zero, "swap_space is the host memory for KV blocks; give that"),
    "disable_sliding_window": Only(
        _OFF, "windows are the model's; give max_model_len=WINDOW, within which a window changes nothing"
    ),
    "enable_chunked_prefill": Only(
        (None, True),
        "prompts are computed in chunks of at most max_num_batched_tokens; raise that to the longest prompt's length",
    ),
    "max_num_partial_prefills": Only(_is_one, "prompts fill a step in the order they run; leave it out"),
    "max_long_partial_prefills": Only(_is_one, "prompts fill a step in the order they run; leave it out"),
    "long_prefill_token_threshold": Only(_is_zero, "prompts fill a step in the order they run; leave it out"),
    "num_lookahead_slots": Only(_is_zero, _NO_SPECULATION),
    "speculative_config": Only(_is_nothing, _NO_SPECULATION),
    "speculative_model": Only((None,), _NO_SPECULATION),
    "num_speculative_tokens": Only(_is_zero, _NO_SPECULATION),
    "structured_outputs_config": Only(
        _is_plain_format_config, "llguidance is the grammar backend; give {'backend': 'guidance'}, or leave it out"
    ),
    "guided_decoding_backend": Only(_is_guidance, "llguidance is the grammar backend; leave it out"),
    "reasoning_parser": Only(_EMPTY, _SERVER),
    "reasoning_parser_plugin": Only(_EMPTY, _NO_PLUGINS),
    "reasoning_config": Only(_is_nothing, "there is no budget for thinking; max_tokens bounds all of an output"),
    "enable_lora": Only(_OFF, NO_LORA),
    "enable_lora_bias": Only(_OFF, NO_LORA),
    "default_mm_loras": Only(_is_nothing, NO_LORA),
    "enable_prompt_adapter": Only(_OFF, "there are no prompt adapters; leave it out"),
    "otlp_traces_endpoint": Only(_EMPTY, _TRACES),
    "collect_detailed_traces": Only(_is_nothing, _TRACES),
    "kv_cache_metrics": Only(_OFF, "LLM.stats and get_metrics say what there is; leave it out"),
    "cudagraph_metrics": Only(_OFF, _COMPILED),
    "enable_mfu_metrics": Only(_OFF, "jaxllm aot reports the operations and bytes of a model's steps; leave it out"),
    "enable_layerwise_nvtx_tracing": Only(_OFF, "LLM.start_profile(DIR) traces a device's operations; leave it out"),
    "profiler_config": Only(_is_nothing, "give the directory when you start: llm.start_profile(DIR)"),
    "scheduler_cls": Only((None,), _NO_PLUGINS),
    "worker_cls": Only((None, "auto", ""), _NO_PLUGINS),
    "worker_extension_cls": Only(_EMPTY, _NO_PLUGINS),
    "io_processor_plugin": Only(_EMPTY, _NO_PLUGINS),
    "logits_processors": Only(
        _is_nothing, "logits are changed on the device, by logit_bias, allowed_token_ids, bad_words and grammars"
    ),
    "additional_config": Only(_is_nothing, _NO_PLUGINS),
    "model_loader_extra_config": Only(_is_nothing, "weights are safetensors or GGUF files; leave it out"),
    "kv_transfer_config": Only((None,), _NO_TRANSFER),
    "kv_events_config": Only((None,), _NO_TRANSFER),
    "ec_transfer_config": Only((None,), _NO_TRANSFER),
    "weight_transfer_config": Only((None,), "give new parameters to LLM.update_params"),
    "stream_interval": Only(_is_one, "each request has its own: SamplingParams(stream_interval=...)"),
    "tokens_only": Only(_OFF, "give skip_tokenizer_init=True"),
    "device": Only(
        (None, "auto"), "set the environment variable JAX_PLATFORMS to cpu, cuda or tpu before importing jax"
    ),
    "rope_scaling": Only((None,), "the configuration has it; give hf_overrides={'rope_scaling': {...}}"),
    "rope_theta": Only((None,), "the configuration has it; give hf_overrides={'rope_theta': ...}"),
}
RENAMED = {
    "num_gpu_blocks_override": "num_blocks",
    "preemption_mode": "preemption",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}

ENGINE_ARGUMENTS: dict[str, Rule] = {
    **{name: Hint(note) for note, names in _HINTS.items() for name in names},
    **_ONLY,
    **{name: Renamed(ours) for name, ours in RENAMED.items()},
}

_SAMPLING = "it is a field of SamplingParams: llm.generate(prompts, SamplingParams({}=...))"
ELSEWHERE = {  # names of other libraries, and of other places
    **{
        name: "give max_model_len"
        for name in ("n_ctx", "max_seq_len", "max_length", "context_length", "max_context_len")
    },
    **{name: "give max_num_seqs" for name in ("batch_size", "max_batch_size", "max_running_requests")},
    **{name: "give dtype" for name in ("torch_dtype", "param_dtype")},
    **{name: "give model" for name in ("model_path", "model_name", "model_id", "pretrained_model_name_or_path")},
    **{name: "give tokenizer" for name in ("tokenizer_path", "tokenizer_name")},
    **{name: "give tensor_parallel_size, or mesh='tensor=4'" for name in ("device_map", "tp_size", "tp", "num_gpus")},
    **{name: _NO_QUANTIZATION for name in ("load_in_8bit", "load_in_4bit")},
    **{name: "give gpu_memory_utilization" for name in ("mem_fraction_static", "gpu_mem_util")},
    "cache_dir": "give download_dir",
    "max_new_tokens": "give SamplingParams(max_tokens=...) to generate",
    **{
        name: _SAMPLING.format(name)
        for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "repetition_penalty", "n")
    },
}


def translate_engine_arguments(call: str, vllm: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `vllm`, arguments that are none of ours, stand for, beside `ours`, which were given by their
    own names. Raises `ValueError` for a value that asks for what is not there, `TypeError` for a name of nobody."""
    for name in vllm:
        if name not in ENGINE_ARGUMENTS:
            raise unknown(call, name, ["model", *ours, *ENGINE_ARGUMENTS], ELSEWHERE)
    renamed = translate(call, vllm, ENGINE_ARGUMENTS)
    for theirs, name in RENAMED.items():
        if name in renamed and ours.get(name) not in (None, "auto", renamed[name]):
            raise ValueError(
                f"{theirs}={renamed[name]!r} and {name}={ours[name]!r} are the same thing; give one of them"
            )
    return renamed
