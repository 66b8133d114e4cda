"""Snippets that build an engine: the arguments of vLLM's `LLM`."""

from tests.from_vllm.snippet import Snippet, refused, runs

NOT_YET = "ValueError"

SNIPPETS: list[Snippet] = [
    runs("model by keyword", "engine = LLM(model=M, **SIZES)", "said(engine)"),
    runs("model by position", "engine = LLM(M, **SIZES)", "said(engine)"),
    runs("trust_remote_code", "engine = LLM(model=M, trust_remote_code=True, **SIZES)", "said(engine)"),
    runs(
        "enforce_eager",
        "engine = LLM(model=M, dtype='float32', max_model_len=512, max_num_seqs=4, enforce_eager=True)",
        "engine.model_config.max_model_len == 512",
    ),
    runs(
        "tokenizer",
        "engine = LLM(model=M, tokenizer=M, **SIZES)",
        "engine.get_tokenizer().encode('ab') == llm.get_tokenizer().encode('ab')",
    ),
    runs("tokenizer_mode", "engine = LLM(model=M, tokenizer_mode='auto', **SIZES)", "said(engine)"),
    runs(
        "skip_tokenizer_init",
        "engine = LLM(model=M, skip_tokenizer_init=True, **SIZES)\n"
        "out = engine.generate({'prompt_token_ids': [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))[0]",
        "len(out.outputs[0].token_ids) == 2 and out.outputs[0].text == ''",
    ),
    runs(
        "seed=None",
        "engine = LLM(model=M, seed=None, **SIZES)\nother = LLM(model=M, seed=None, **SIZES)",
        "engine.engine.config.seed != other.engine.config.seed",
    ),
    runs(
        "dtype='half'",
        "engine = LLM(model=M, dtype='half', max_model_len=512)",
        "str(engine.model_config.dtype) == 'float16'",
    ),
    runs(
        "dtype='float'",
        "engine = LLM(model=M, dtype='float', max_model_len=512)",
        "str(engine.model_config.dtype) == 'float32'",
    ),
    runs(
        "dtype of jax.numpy",
        "import jax.numpy as jnp\nengine = LLM(model=M, dtype=jnp.bfloat16, max_model_len=512)",
        "str(engine.model_config.dtype) == 'bfloat16'",
    ),
    runs("tensor_parallel_size", "engine = LLM(model=M, tensor_parallel_size=1, **SIZES)", "said(engine)"),
    runs("pipeline_parallel_size", "engine = LLM(model=M, pipeline_parallel_size=1, **SIZES)", "said(engine)"),
    runs("data_parallel_size", "engine = LLM(model=M, data_parallel_size=1, **SIZES)", "said(engine)"),
    runs("gpu_memory_utilization", "engine = LLM(model=M, gpu_memory_utilization=0.9, **SIZES)", "said(engine)"),
    runs(
        "swap_space",
        "engine = LLM(model=M, swap_space=4, **SIZES)",
        "engine.llm_engine.vllm_config.cache_config.swap_space == 4",
    ),
    runs("cpu_offload_gb", "engine = LLM(model=M, cpu_offload_gb=0, **SIZES)", "said(engine)"),
    runs("quantization=None", "engine = LLM(model=M, quantization=None, **SIZES)", "said(engine)"),
    runs("quantization='fp8'", "engine = LLM(model=M, quantization='fp8', **SIZES)", "said(engine)"),
    refused(
        "quantization='awq'",
        "LLM(model=M, quantization='awq', **SIZES)",
        NOT_YET,
        "quantization='awq' is unknown; choose one of int8, int4, fp8",
    ),
    runs("kv_cache_dtype='auto'", "engine = LLM(model=M, kv_cache_dtype='auto', **SIZES)", "said(engine)"),
    runs(
        "kv_cache_dtype='fp8'",
        "engine = LLM(model=M, kv_cache_dtype='fp8', calculate_kv_scales=True, **SIZES)",
        "said(engine) and engine.llm_engine.vllm_config.cache_config.cache_dtype == 'fp8'",
        note="scales are measured once, at the start",
    ),
    refused(
        "kv_cache_dtype='fp8_e5m2'",
        "LLM(model=M, kv_cache_dtype='fp8_e5m2', **SIZES)",
        NOT_YET,
        "kv_cache_dtype='fp8_e5m2' has two bits of mantissa; give 'fp8'",
    ),
    runs(
        "enable_prefix_caching",
        "engine = LLM(model=M, enable_prefix_caching=True, **SIZES)",
        "engine.llm_engine.vllm_config.cache_config.enable_prefix_caching",
    ),
    runs("enable_chunked_prefill", "engine = LLM(model=M, enable_chunked_prefill=True, **SIZES)", "said(engine)"),
    runs(
        "max_num_batched_tokens",
        "engine = LLM(model=M, max_num_batched_tokens=256, **SIZES)",
        "engine.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 256",
    ),
    runs(
        "block_size",
        "engine = LLM(model=M, block_size=16, **SIZES)",
        "engine.llm_engine.vllm_config.cache_config.block_size == 16",
    ),
    runs("disable_log_stats", "engine = LLM(model=M, disable_log_stats=True, **SIZES)", "said(engine)"),
    runs("download_dir", "engine = LLM(model=M, download_dir='x', **SIZES)", "said(engine)"),
    runs("load_format='auto'", "engine = LLM(model=M, load_format='auto', **SIZES)", "said(engine)"),
    runs(
        "load_format='dummy'",
        "engine = LLM(model=M, load_format='dummy', **SIZES)",
        "len(engine.generate('ab', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3",
    ),
    runs("revision", "engine = LLM(model=M, revision='main', **SIZES)", "said(engine)"),
    runs(
        "hf_overrides",
        "engine = LLM(model=M, hf_overrides={'max_position_embeddings': 1024}, dtype='float32', max_num_seqs=4)",
        "engine.model_config.max_model_len == 1024",
    ),
    refused(
        "enable_lora",
        "LLM(model=M, enable_lora=True, **SIZES)",
        NOT_YET,
        "there are no LoRA adapters yet; merge the adapter into the weights",
    ),
    refused(
        "speculative_config",
        "LLM(model=M, speculative_config={'method': 'ngram', 'num_speculative_tokens': 3, 'prompt_lookup_max': 3}, "
        "**SIZES)",
        NOT_YET,
        "there is no speculative decoding yet; leave it out, the text is the same",
    ),
    runs("compilation_config", "engine = LLM(model=M, compilation_config=0, **SIZES)", "said(engine)"),
    runs(
        "generation_config='vllm'",
        "engine = LLM(model=M, generation_config='vllm', **SIZES)",
        "engine.get_default_sampling_params().temperature == 1.0",
    ),
    runs(
        "override_generation_config",
        "engine = LLM(model=M, override_generation_config={'temperature': 0.1}, **SIZES)",
        "engine.get_default_sampling_params().temperature == 0.1",
    ),
    refused(
        "max_logprobs=50", "LLM(model=M, max_logprobs=50, **SIZES)", NOT_YET, "max_logprobs=50 must be an integer in"
    ),
    runs(
        "logprobs_mode='processed_logprobs'",
        "engine = LLM(model=M, logprobs_mode='processed_logprobs', **SIZES)",
        "engine.engine.config.logprobs_mode == 'sampled'",
    ),
    runs(
        "runner='pooling'",
        "engine = LLM(model=M, runner='pooling', **SIZES)",
        "len(engine.embed(['a'])[0].outputs.embedding) > 0",
    ),
    refused(
        "a name of the hub, without a network",
        "LLM(model='facebook/opt-125m', **SIZES)",
        "JaxLLMError",
        "facebook/opt-125m",
        note="Fetched where there is a network; here the message says why it can't be, and what else to give.",
    ),
    runs(
        "distributed_executor_backend",
        "engine = LLM(model=M, distributed_executor_backend='mp', **SIZES)",
        "said(engine)",
    ),
    runs(
        "structured_outputs_config",
        "engine = LLM(model=M, structured_outputs_config={'backend': 'auto'}, **SIZES)",
        "said(engine)",
    ),
    runs("max_seq_len_to_capture (old)", "engine = LLM(model=M, max_seq_len_to_capture=512, **SIZES)", "said(engine)"),
    runs(
        "num_gpu_blocks_override",
        "engine = LLM(model=M, num_gpu_blocks_override=200, **SIZES)",
        "engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == 200",
    ),
    refused(
        "disable_sliding_window",
        "LLM(model=M, disable_sliding_window=True, **SIZES)",
        NOT_YET,
        "give max_model_len=WINDOW, within which a window changes nothing",
    ),
    runs("limit_mm_per_prompt", "engine = LLM(model=M, limit_mm_per_prompt={'image': 0}, **SIZES)", "said(engine)"),
    runs(
        "EngineArgs",
        "from vllm import EngineArgs\nimport dataclasses\n"
        "args = EngineArgs(model=M, max_model_len=128, max_num_seqs=4)\n"
        "engine = LLM(**dataclasses.asdict(args))",
        "said(engine)",
    ),
]
