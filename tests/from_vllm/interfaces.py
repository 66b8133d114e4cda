"""Snippets around generation: the tokenizer, the engine's state and configuration, and names to import."""

from tests.from_vllm.snippet import Snippet, refused, runs

TOKENIZER: list[Snippet] = [
    runs(
        "encode",
        "t = llm.get_tokenizer()\nids = t.encode('Hello world')",
        "t.decode(ids, skip_special_tokens=True) == 'Hello world'",
    ),
    runs(
        "call",
        "t = llm.get_tokenizer()\nx = t('Hello world')",
        "x.input_ids == x['input_ids'] == t.encode('Hello world')",
    ),
    runs(
        "apply_chat_template",
        "t = llm.get_tokenizer()\ntext = t.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False, "
        "add_generation_prompt=True)",
        "text.endswith('<|im_start|>assistant\\n')",
    ),
    runs(
        "decode",
        "t = llm.get_tokenizer()\nprint(t.decode([65, 66, 67]), t.eos_token_id, t.vocab_size)",
        "t.eos_token_id == 257",
    ),
    runs(
        "special tokens",
        "t = llm.get_tokenizer()\nprint(t.eos_token, t.pad_token_id, t.convert_ids_to_tokens([1]))",
        "t.eos_token == '</s>' and t.convert_tokens_to_ids('</s>') == 257",
    ),
    runs("len", "t = llm.get_tokenizer()\nn = len(t)", "n == 263"),
]

ENGINE: list[Snippet] = [
    runs("llm_engine", "print(type(llm.llm_engine))", "not llm.llm_engine.has_unfinished_requests()"),
    runs("llm_engine.model_config", "n = llm.llm_engine.model_config.max_model_len", "n == 128"),
    runs("llm_engine.vllm_config", "n = llm.llm_engine.vllm_config.model_config.max_model_len", "n == 128"),
    runs("model_config", "n = llm.model_config.max_model_len", "n == 128"),
    runs(
        "embed",
        "(output,) = llm.embed(['a'])\nembeds = output.outputs.embedding",
        "len(embeds) == output.outputs.hidden_size and abs(sum(x * x for x in embeds) - 1) < 1e-5",
    ),
    runs("score", "(output,) = llm.score('a', 'a')", "abs(output.outputs.score - 1) < 1e-5"),
    runs(
        "encode a prompt",
        "(output,) = llm.encode(['a'], pooling_task='embed')",
        "output.finished and output.outputs.data.ndim == 1",
    ),
    refused("classify", "llm.classify(['a'])", "ValueError", "take a model that was trained to classify"),
    refused("reward", "llm.reward(['a'])", "NotImplementedError", "call encode"),
    runs(
        "sleep and wake_up",
        "before = llm.generate('a', SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids\n"
        "llm.sleep(level=1)\nllm.wake_up()\n"
        "after = llm.generate('a', SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids",
        "before == after",
    ),
    runs(
        "reset_prefix_cache",
        "p = SamplingParams(max_tokens=1)\nllm.generate('b' * 100, p)\ndone = llm.reset_prefix_cache()\n"
        "out = llm.generate('b' * 100, p)",
        "done is True and out[0].num_cached_tokens == 0",
    ),
    runs(
        "get_metrics",
        "from vllm.v1.metrics.reader import Counter, Gauge\nfound = {m.name: m for m in llm.get_metrics()}",
        "isinstance(found['vllm:num_requests_running'], Gauge) "
        "and isinstance(found['vllm:prefix_cache_hits'], Counter)",
    ),
    refused(
        "collective_rpc",
        "llm.collective_rpc('x')",
        "NotImplementedError",
        "there are no workers to call, the engine is in this process; LLM.params, update_params",
    ),
    refused(
        "apply_model",
        "llm.apply_model(lambda m: 1)",
        "NotImplementedError",
        "a model is a function of its parameters; read those as llm.params",
    ),
    runs(
        "start_profile",
        "llm.start_profile()\nllm.generate('a', SamplingParams(max_tokens=2))\nllm.stop_profile()\nimport os, pathlib",
        "any(pathlib.Path(os.environ['VLLM_TORCH_PROFILER_DIR']).rglob('*.xplane.pb'))",
    ),
    runs(
        "enqueue and wait_for_completion",
        "ids = llm.enqueue(['a', 'b'], SamplingParams(max_tokens=2))\nout = llm.wait_for_completion()",
        "[o.request_id for o in out] == ids",
    ),
    runs("del llm", "engine = LLM(model=M, **SIZES)\ndel engine\nimport gc\ngc.collect()", "True"),
]

IMPORTS: list[Snippet] = [
    runs(
        "AsyncLLMEngine, AsyncEngineArgs",
        "from vllm import AsyncLLMEngine, AsyncEngineArgs, AsyncLLM",
        "AsyncLLMEngine is AsyncLLM",
    ),
    runs(
        "vllm.engine.arg_utils",
        "from vllm.engine.arg_utils import EngineArgs, AsyncEngineArgs\nargs = EngineArgs(model=M, max_model_len=128)",
        "args.max_model_len == 128",
    ),
    runs(
        "LLMEngine, EngineArgs",
        "from vllm import LLMEngine, EngineArgs\n"
        "engine = LLMEngine.from_engine_args(EngineArgs(model=M, **SIZES))\n"
        "engine.add_request('0', 'ab', SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "done = []\n"
        "while engine.has_unfinished_requests():\n    done += [o for o in engine.step() if o.finished]",
        "len(done) == 1 and len(done[0].outputs[0].token_ids) == 3",
    ),
    runs(
        "vllm.v1.engine.async_llm",
        "from vllm.v1.engine.async_llm import AsyncLLM\nimport vllm",
        "AsyncLLM.__module__ == 'jaxllm.async_llm'",
    ),
    runs(
        "vllm.outputs",
        "from vllm.outputs import RequestOutput, CompletionOutput",
        "'outputs' in RequestOutput.__dataclass_fields__",
    ),
    runs(
        "vllm.sampling_params",
        "from vllm.sampling_params import SamplingParams, BeamSearchParams, RequestOutputKind, StructuredOutputsParams",
        "StructuredOutputsParams(choice=['a']).choice == ['a']",
    ),
    runs(
        "TextPrompt, TokensPrompt",
        "from vllm import TextPrompt, TokensPrompt",
        "TextPrompt(prompt='a') == {'prompt': 'a'}",
    ),
    runs("vllm.utils.random_uuid", "from vllm.utils import random_uuid", "len(random_uuid()) == 32"),
    refused(
        "vllm.lora.request",
        "from vllm.lora.request import LoRARequest",
        "ImportError",
        "there are no LoRA adapters yet; merge the adapter into the weights",
    ),
    runs("__version__", "import vllm\nversion = vllm.__version__", "version.count('.') >= 1"),
    runs("vllm.logprobs", "from vllm.logprobs import Logprob", "Logprob(-0.5, 1, 'a').logprob == -0.5"),
    refused(
        "vllm.distributed.parallel_state",
        "from vllm.distributed.parallel_state import destroy_model_parallel",
        "ImportError",
        "there are no process groups; llm.close() frees what an engine holds",
    ),
    runs("vllm.entrypoints.llm", "from vllm.entrypoints.llm import LLM as Same", "Same is LLM"),
    refused(
        "ModelRegistry",
        "from vllm import ModelRegistry",
        "ImportError",
        "give LLM a Flax module with the interface of jaxllm.models",
    ),
    runs(
        "PoolingParams, EmbeddingRequestOutput",
        "from vllm import PoolingParams, EmbeddingRequestOutput",
        "PoolingParams(dimensions=4).dimensions == 4",
    ),
]
