"""`LLM`: offline generation in the caller's own process and thread."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from tqdm import tqdm

from jaxllm.engine.caller import CallerLoop, Inbox
from jaxllm.engine.failure import check_any
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.from_vllm.request_arguments import (
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    VllmChatArguments,
    VllmGenerateArguments,
    check_request_arguments,
)
from jaxllm.llm_engine import LLMEngine, OwnRequests
from jaxllm.llm_pooling import Prompts
from jaxllm.llm_rollout import LLMRollout
from jaxllm.outputs import BeamSearchOutput, RequestOutput
from jaxllm.progress import disabled, progress_bar
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.prompts import (
    TokensPrompt,
    is_conversation,
    parse_each,
    parse_params,
    parse_prompt,
    parse_prompts,
    with_salt,
)


class LLM(LLMRollout):
    """A model ready to generate, in the caller's thread. Streams of one `LLM` may be read in turns, and threads that
    share it take turns with the steps; `AsyncLLM` is for many concurrent callers.

        llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
        print(llm.generate("The capital of France is")[0].outputs[0].text)

    Ctrl-C takes effect between two steps, a second one at once: that loses the requests that run, and no more.

    The model:
      model: a local directory in Hugging Face format (None: the small model in the package); a GGUF file, or a
        directory with one; a name of the hub as "org/name", "org/name@revision" or "org/name:FILE.gguf"; a model of
        transformers that is in memory (with its tokenizer as `tokenizer`); a Flax module
        with the interface of `jaxllm.models`, served as it is, its class, attributes and arrays included; a pair
        (configuration, parameter pytree); or a function. Parameters on the device are used where they lie.
      params, shape, head: of a function `fn(params, tokens, ctx, caches) -> (hidden, caches)`: a pytree, a
        `FunctionShape`, and `head(params, hidden) -> logits`. A Linen module takes the variables of `init` as params,
        and the name of a method as head ("logits"); an NNX module that has no `cfg` takes a shape alone.
        docs/your_model.md has examples.
      config: of a `model` that is a directory of Orbax's, with parameters that a trainer has saved: a `Config` of
        `jaxllm.models`, a directory in Hugging Face format, or the content of its config.json. docs/training.md has
        more.
      revision, download_dir: of a name of the hub, which is fetched into huggingface_hub's cache otherwise.
      tokenizer: in the place of the model's: a directory, a GGUF file, a `tokenizers` or `transformers` tokenizer, or
        any object with `encode` and `decode`. `skip_tokenizer_init=True` is for prompts and outputs of ids alone.
      dtype: "auto" is bfloat16 on accelerators. On a CPU it is float32, or bfloat16 where the files hold 16-bit floats
        and the processor multiplies pairs of them (AVX512-BF16); not on several hosts or devices, nor with `record` or
        `batch_invariant`, nor for the model in the package. There other processors hold weights in bfloat16 that are
        stored so, to compute in float32: results are those of float32, and `update_params` rounds to bfloat16. And a
        CPU multiplies a GGUF file's blocks as they are, which a dtype dequantises; and rounds to int8, 32 numbers by a
        scale, what it multiplies with weights of integers or float4, which a dtype does not.
      load_format: "dummy" for random weights; "auto", "safetensors" and "gguf" read them.
      quantization: "int8", "int4" or "fp8": dense weights of the layers' products become that while they load, one
        scale an output or, of int4, a group of 128 inputs. "gguf": the blocks of a GGUF file stay as they are, instead
        of being dequantised. Other checkpoints that are quantised need no argument.
      hf_overrides: keys of config.json, and what they shall be.
      task: "embed" for a model that generates, so that it makes embeddings alone; None: what its files say it is for.
      generation_config, override_generation_config: what `get_default_sampling_params` returns: of the model's files
        ("auto"), of a directory, or the defaults ("vllm"); and what goes before that, as {"temperature": 0.5}.
      seed: of requests that bring none; None: another one each time.

    Sizes, from the model and the device when None:
      max_model_len: tokens of prompt and output.
      max_num_seqs: requests that run at once, of each shard of data.
      max_num_batched_tokens: of a step, likewise.
      block_size, num_blocks: of the KV pool; tokens, and blocks, likewise.
      kv_cache_bytes: of the KV pool on each device, in the place of `num_blocks`: beside a trainer, say, whose
        activations are not there yet. Without either the pool takes of what is free when it is built.
      max_logprobs: that a request may ask for, at most 20.
      logprobs_mode: of requests that bring none: "raw", "processed" or "sampled"; see `SamplingParams`.
      batch_invariant: whether tokens and log-probabilities of a request are the same to the bit alone, in any batch,
        in any chunks, after prefix hits and preemptions. docs/log_probabilities.md says for which models.

    Devices and memory:
      mesh: "tensor=4" (as is `tensor_parallel_size=4`), a `jax.sharding.Mesh`, or None for one device. With
        "data=2,tensor=4" there are two shards of data: each has four devices, all parameters, and its own requests.
      axes: which axes of a `jax.sharding.Mesh` are the engine's, where they have other names:
        {"tensor": "tp", "data": ("fsdp", "dp")}. Its axes may be of any type, as may those of a mesh around the call.
      gpu_memory_utilization: the share of each accelerator's whole memory that this process may use (0.92): what its
        other arrays take is left to them, and JAX allocates no more than XLA_CLIENT_MEM_FRACTION (0.75 of a GPU unless
        set). On a CPU it says nothing: the KV pool takes a sixteenth of the machine's memory at most, and no more than
        is free, unless `num_blocks` gives its size.
      enable_prefix_caching: whether prompts share the blocks of equal beginnings (True).
      preemption, swap_space: when blocks run out, the last requests go to at most `swap_space` GiB of host memory
        ("swap"), or are computed again ("recompute"); "auto" measures which is faster.
      kv_cache_dtype: "int8" or "fp8" keeps keys and values in 8 bits: twice as many tokens in the same memory as in
        bfloat16. Scales are the checkpoint's; else those of fp8 are 1, and those of int8 are measured at the start, as
        `calculate_kv_scales=True` asks for any. "auto" keeps them in the model's dtype. docs/evaluation.md has what it
        costs.
      record: a new file for what the engine asks of the device, prompts included: `jaxllm replay FILE` does it again,
        for bug reports.
      compilation_cache: a private folder for executables, which the next start loads, or whether to have one; None is
        one in ~/.cache/jaxllm, unless JAX's own cache is configured (it serves then) or switched off.
      cluster: the hosts over which the engine runs, one process each: a `Cluster`, or "tpu", "slurm", "mpi" or "auto"
        for what started the program. The first host gets the `LLM`; on the others this call returns never: the program
        ends when the first has closed it. docs/several_hosts.md has more. `ClusterError` for a group that can't be
        formed, `GroupLostError` once a member is lost, and seconds later the end of the process.

    vLLM's other arguments are accepted where their value asks for nothing that is not so; docs/from_vllm.md has them.

    Raises `ValueError`, `ModelFormatError`, `DeviceError`, `MeshError` or `OutOfMemoryError`, for names
    `ModelNotFoundError`, `ModelAccessError` or `DownloadError`, each with what to do about it, and `TypeError` for an
    unknown argument.
    """

    def _start(self) -> None:
        self._ids = itertools.count()
        self._loop = CallerLoop(self.engine)
        self._stepped, self._enqueued = OwnRequests(self._loop), OwnRequests(self._loop)
        self._enqueued_ids: list[str] = []
        try:
            self._wait_first()
        except BaseException:  # Ctrl-C too: compiling goes on in a thread otherwise
            self.close()
            raise

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine with vLLM's interface for those who step it themselves."""
        return LLMEngine(self, self._stepped)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmGenerateArguments],
    ) -> list[RequestOutput]:
        """Completes all prompts; one output each, in their order.

        A prompt is a string, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": [...]}`; a dict may have a
        `cache_salt`. `use_tqdm` may be what makes the progress bar, as `tqdm.tqdm` does.
        `sampling_params` (None: what the model recommends) and `priority` (lower runs first) are one for all prompts,
        or one for each. Raises `ValueError` before anything runs if any prompt or parameter is unusable. Interrupted,
        it aborts what is left.

        A prompt whose steps fail on the device, or whose logits are not finite, has an output with finish_reason
        "error", whose `error` names the cause, and the others go on. `EngineError` is raised if all prompts end so, as
        every step fails: when a training step was given the parameters to donate, say, and `update_params` is called
        for.
        """
        check_request_arguments("generate", vllm, GENERATE_ARGUMENTS)
        results: dict[int, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params, priority)
        with progress_bar(use_tqdm, len(requests), "generating") as bar:
            for index, output in self._run(requests):
                results[index] = output
                bar.update()
        check_any(self.engine.failure, list(results.values()))
        return [results[i] for i in range(len(requests))]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (prompt index, output so far) whenever a prompt's output has grown; once, when it
        has finished, with `beam_width` or a `best_of` above `n`. What fails has an output with `error`.

        Closing the iterator aborts what is left. While it stays open, its requests go on with every other call, and
        their outputs are kept for it: each delta, and of outputs so far the newest.
        """
        return self._run(self._requests(prompts, sampling_params, priority), stream=True)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best completions that a beam search finds for each prompt, with their prompts before them.

        Short for `generate` with `params.sampling_params`; `SamplingParams` with `beam_width` has more to say (stop
        strings, penalties), returns as few as `n`, and computes log-probabilities only if asked. Raises as `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is a {type(params).__name__}; expected BeamSearchParams(beam_width, max_tokens)")
        return [
            BeamSearchOutput.of(output, self._prompt_text(output, params), params.length_penalty)
            for output in self.generate(prompts, params.sampling_params, use_tqdm=use_tqdm)
        ]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm: Unpack[VllmChatArguments],
    ) -> list[RequestOutput]:
        """Answers a conversation, `[{"role": "user", "content": "Hi"}]`, or each of a list of conversations.

        `chat_template` is None for the model's own, the name of one of its own, "vicuna" or "llama2", a file, or Jinja
        source. `continue_final_message` goes on with the last message, and needs `add_generation_prompt=False`.
        `tools` (JSON schemas) and `chat_template_kwargs` are for the template. The rest is as in `generate`.
        """
        check_request_arguments("chat", vllm, CHAT_ARGUMENTS)
        options = dict(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        conversations = [messages] if is_conversation(messages) else messages
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, **options: Any) -> TokensPrompt:
        """The prompt that `chat` makes of one conversation, with the same options; ValueError if it can't."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer; pass tokenizer=...")
        text = self.tokenizer.chat.render(messages, **options)
        # The template has written the beginning of sequence itself.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def generate_iter(
        self, requests: Iterable[tuple[Any, SamplingParams | None]]
    ) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Completes any number of (prompt, sampling parameters), drawn from an iterator as the engine has room.

        Yields after each step those that finished in it, possibly none, as (index, output). One that can't be served
        has an output with `error` and without completions, and the others go on. Closing the iterator aborts what is
        left.
        """

        def prepare(index: int, item: tuple[Any, SamplingParams | None]) -> PreparedRequest | RequestOutput:
            prompt, sampling = item
            try:
                return self._prepare(prompt, sampling)
            except ValueError as error:
                return _refusal(self._next_id(), prompt, error)

        return self._pull(requests, prepare)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[str]:
        """Hands requests over, and returns their ids; they run while something waits for outputs, and
        `wait_for_completion` returns theirs. Arguments and errors are as of `generate`."""
        self.engine.check_params()
        requests = self._requests(prompts, sampling_params, priority)
        ids = [self._next_id() for _ in requests]
        for request_id, (prepared, one) in zip(ids, requests, strict=True):
            self._enqueued.submit(request_id, prepared, priority=one, stream=False)
        self._enqueued_ids += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """The outputs of all that was enqueued, in that order."""
        ids, self._enqueued_ids = self._enqueued_ids, []
        done: dict[str, RequestOutput] = {}
        with progress_bar(use_tqdm, len(ids), "generating") as bar:
            while len(self._enqueued):
                for output in self._enqueued.step():
                    done[output.request_id] = output
                    bar.update()
        return [done[request_id] for request_id in ids]

    def wait_compiled(self) -> None:
        """Blocks until every executable is compiled: before a benchmark, say."""
        self.engine.wait_compiled()

    def _wait_first(self) -> None:
        # Without a total: a few are waited for, and the others follow in the background.
        with tqdm(desc="compiling the first steps", unit=" ready", disable=disabled(), leave=False) as bar:
            self.engine.wait_compiled(lambda: bar.update(self.stats().num_compiled - bar.n), first=True)

    def close(self) -> None:
        """Frees the device's memory and stops compiling."""
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompts: Any, params: Any, priority: Any) -> list[tuple[PreparedRequest, int]]:
        """Each prompt's request, checked, and its priority."""
        parsed = parse_prompts(prompts, self.tokenizer)
        params = self.get_default_sampling_params() if params is None else params
        each = zip(
            parsed, parse_params(params, len(parsed)), parse_each("priority", priority, int, len(parsed)), strict=True
        )
        return [
            (self.engine.prepare(prompt.token_ids, with_salt(sampling, prompt.cache_salt), prompt=prompt.text), one)
            for prompt, sampling, one in each
        ]

    def _run(self, requests: list[tuple[PreparedRequest, int]], **options: Any) -> Iterator[tuple[int, Any]]:
        self.engine.check_params()
        running: dict[str, int] = {}  # request id -> index
        inbox = Inbox()
        try:
            for index, (prepared, priority) in enumerate(requests):
                request_id = self._next_id()
                running[request_id] = index
                self._loop.submit(prepared, inbox, request_id=request_id, priority=priority, **options)
            while running:
                for output in self._loop.wait(inbox):
                    index = running.pop(output.request_id) if output.finished else running[output.request_id]
                    yield index, output
        finally:
            self._loop.drop(running, inbox)

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _prompt_text(self, output: RequestOutput, params: BeamSearchParams) -> str | None:
        if self.tokenizer is None:
            return None
        if output.prompt is not None:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def _prepare(self, prompt: Any, params: SamplingParams | None) -> PreparedRequest:
        text, token_ids, salt = parse_prompt(prompt, self.tokenizer)
        params = self.get_default_sampling_params() if params is None else params
        return self.engine.prepare(token_ids, with_salt(params, salt), prompt=text)


def _refusal(request_id: str, prompt: Any, error: ValueError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=[], outputs=[], finished=True, error=str(error)
    )
