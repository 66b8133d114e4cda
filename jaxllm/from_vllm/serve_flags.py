"""vLLM's command-line flags that are none of `jaxllm serve`: what each of their values means here. The flags of engine
arguments are in `engine_arguments`."""

from jaxllm.from_vllm.engine_arguments import ENGINE_ARGUMENTS, NO_LORA
from jaxllm.from_vllm.rules import Hint, Only, Rule

_OFF = (None, False)
_UNLOGGED = (
    "prompts and answers are never logged; --enable-log-requests, /metrics and --otlp-traces-endpoint have figures"
)
_ONE_SERVER = "one process answers for one engine; start a server for each part of the devices, behind a balancer"
_NO_CODE = "no code is loaded by its name; leave it out"
_NO_DOCS = "/openapi.json describes the routes, behind the API key if there is one; there are no pages of it"


_FRONTEND: dict[str, Rule] = {
    "api_server_count": Only((None, 1), _ONE_SERVER),
    "headless": Only(_OFF, _ONE_SERVER),
    "data_parallel_supervisor_port": Hint(_ONE_SERVER),
    "uds": Only((None,), "a server listens on an address; give --host and --port"),
    "enable_log_outputs": Only(_OFF, _UNLOGGED),
    **{
        name: Hint(_UNLOGGED)
        for name in (
            *("disable_log_requests", "disable_uvicorn_access_log", "disable_access_log_for_endpoints", "max_log_len"),
            "enable_log_deltas",
        )
    },
    "log_config_file": Only((None,), "the log goes to standard error; give --uvicorn-log-level"),
    "log_error_stack": Only(_OFF, "the log has the traceback of every internal error anyway; leave it out"),
    "enable_prompt_tokens_details": Hint("usage always has prompt_tokens_details"),
    "enable_request_id_headers": Hint("every answer has the header X-Request-Id"),
    "enable_tokenizer_info_endpoint": Hint("/tokenizer_info is always there"),
    "enable_server_load_tracking": Hint("/load is always there"),
    "enable_force_include_usage": Only(
        _OFF, 'streams have it when the request says "stream_options": {"include_usage": true}'
    ),
    "enable_per_request_metrics": Only(_OFF, "--otlp-traces-endpoint sends a span with the times of each request"),
    "return_tokens_as_token_ids": Only(_OFF, 'a request gets its ids with "return_token_ids": true; leave it out'),
    "disable_fastapi_docs": Hint(_NO_DOCS),
    "enable_offline_docs": Only(_OFF, _NO_DOCS),
    "disable_frontend_multiprocessing": Hint("HTTP and the engine are always two processes"),
    "response_role": Only((None, "assistant"), "answers are the assistant's; leave it out"),
    "chat_template_content_format": Only(
        (None, "auto", "string"), "contents are texts for the chat template; leave it out"
    ),
    "trust_request_chat_template": Only(_OFF, "requests bring no chat templates; give --chat-template to the server"),
    "enable_auto_tool_choice": Only((None, True), 'a request without tool calls says "tool_choice": "none"'),
    "exclude_tools_when_tool_choice_none": Only((None, True), 'tools are left out of prompts by "tool_choice": "none"'),
    "tool_parser_plugin": Only((None, ""), _NO_CODE),
    "tool_server": Only((None,), "the server calls no tools; it gives their calls to the client"),
    "middleware": Only((None, ""), _NO_CODE),
    "lora_modules": Only((None,), NO_LORA),
    "enable_ssl_refresh": Only(_OFF, "certificates are read once; start the server anew, after SIGTERM it drains"),
    "h11_max_header_count": Only((None,), "a head's bytes are bounded: --h11-max-incomplete-event-size"),
    "fingerprint_mode": Only((None, "none"), "answers have no system_fingerprint; leave it out"),
    "fingerprint_value": Only((None,), "answers have no system_fingerprint; leave it out"),
    "skip_tokenizer_init": Only(_OFF, "requests may hold token ids with a tokenizer too; leave it out"),
    "tokens_only": Only(_OFF, "prompts may be token ids in any request; leave it out"),
    "output_tmp_dir": Only((None,), "results are written where --output-file says, line by line; leave it out"),
    "enable_metrics": Only(_OFF, "a batch has no metrics of its own; jaxllm serve has /metrics"),
}
FLAGS: dict[str, Rule] = {**ENGINE_ARGUMENTS, **_FRONTEND}
SHORT = {  # name of the argument -> what else vLLM calls its flag
    "api_server_count": "-asc",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "enable_expert_parallel": "-ep",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "speculative_config": "-sc",
    "nnodes": "-n",
    "node_rank": "-r",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "optimization_level": "-O",
}
SWITCHES = frozenset(  # vLLM's flags without a value, each with a --no- form
    {
        *("aggregate_engine_logging", "async_scheduling", "cudagraph_metrics"),
        *("data_parallel_external_lb", "data_parallel_hybrid_lb", "disable_cascade_attn", "disable_chunked_mm_input"),
        *("disable_custom_all_reduce", "disable_fastapi_docs", "disable_frontend_multiprocessing"),
        *("disable_hybrid_kv_cache_manager", "disable_log_requests", "disable_log_stats"),
        *("disable_mm_preprocessor_cache", "disable_nccl_for_dp_synchronization", "disable_sliding_window"),
        *("disable_uvicorn_access_log", "disable_async_output_proc", "enable_auto_tool_choice"),
        *("enable_chunked_prefill", "enable_dbo", "enable_elastic_ep", "enable_eplb", "enable_expert_parallel"),
        *("enable_flashinfer_autotune", "enable_force_include_usage", "enable_layerwise_nvtx_tracing"),
        *("enable_log_deltas", "enable_log_outputs", "enable_logging_iteration_details"),
        *("enable_lora", "enable_lora_bias", "enable_metrics", "enable_mfu_metrics", "enable_mm_embeds"),
        *("enable_mm_processor_stats", "enable_offline_docs", "enable_per_request_metrics", "enable_prompt_adapter"),
        *("enable_prompt_embeds", "enable_prompt_tokens_details", "enable_request_id_headers"),
        *("enable_server_load_tracking", "enable_sleep_mode", "enable_ssl_refresh", "enable_tokenizer_info_endpoint"),
        *("enable_tower_connector_lora", "enforce_eager", "exclude_tools_when_tool_choice_none"),
        *("fail_on_environ_validation", "fully_sharded_loras", "headless", "interleave_mm_strings"),
        *("kv_cache_metrics", "kv_sharing_fast_prefill", "language_model_only", "log_error_stack", "mm_encoder_only"),
        *("numa_bind", "ray_workers_use_nsight", "return_tokens_as_token_ids", "scheduler_reserve_full_isl"),
        *("skip_mm_profiling", "skip_tokenizer_init", "specialize_active_lora", "tokens_only", "trust_remote_code"),
        *("trust_request_chat_template", "use_tqdm_on_load", "use_v2_block_manager", "worker_use_ray"),
    }
)
SEVERAL = frozenset(  # vLLM's flags with any number of values
    {
        *("collect_detailed_traces", "cuda_graph_sizes", "cudagraph_capture_sizes", "ignore_patterns"),
        *("kv_cache_dtype_skip_layers", "logits_processors", "lora_modules", "lora_target_modules", "middleware"),
        *("numa_bind_cpus", "numa_bind_nodes", "cpu_offload_params", "offload_params", "allowed_media_domains"),
    }
)
