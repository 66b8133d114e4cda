"""The engine's settings, checked once; `auto` and None are resolved into numbers before the engine exists."""

from bisect import bisect_right
from dataclasses import dataclass

from jaxllm.argument_checks import check_float, check_int
from jaxllm.engine.host_memory import machine_bytes
from jaxllm.engine.schedule.cache_groups import EVERYTHING, CacheGroup
from jaxllm.sampling_checks import MAX_LOGPROBS, LogprobsMode

BLOCK_SIZE = 32  # tokens
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048  # on accelerators
GPU_MEMORY_UTILIZATION = 0.92  # share of an accelerator's memory that the process may use, unless told otherwise
# What JAX reads of how much of a GPU it may allocate; the second is the older name.
MEM_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MOST_BLOCKS = 2**30
PREEMPTIONS = ("auto", "swap", "recompute")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the batch and of the pool. Raises `ValueError` naming field, value and range."""

    # Of each shard of data: slots, a step's tokens, and the pool.
    max_model_len: int  # tokens of a sequence, prompt included
    max_num_seqs: int  # sequences running at once: slots
    max_num_batched_tokens: int  # tokens of a step
    block_size: int  # tokens of a block
    num_blocks: int  # of all groups of layers together
    num_shards: int = 1  # of data: the mesh's
    min_bucket: int = 1  # tokens that a step is padded to at least, and samples of a sampler; by the platform
    free_padding: bool = False  # whether tokens that pad a step take no time; by the platform and the model
    groups: tuple[CacheGroup, ...] = EVERYTHING  # of layers, which share the pool
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float | None = None  # share of each accelerator's memory; None: the default
    preemption: str = "auto"  # when blocks run out: "swap", "recompute", or what is measured to be faster
    swap_space: float | None = None  # GiB of host memory for swapped blocks; None: 4, or an eighth of the machine's
    kv_cache_dtype: str = "auto"  # of keys and values in the pool: the model's, or 8 bits
    measures_kv_scales: bool = False  # whether their scales come from what the parameters make of some tokens
    seed: int = 0  # of requests that bring none
    max_logprobs: int = MAX_LOGPROBS  # that a request may ask for, of each token
    logprobs_mode: LogprobsMode = "raw"  # of requests that bring none
    generates: bool = True  # whether the model makes tokens; otherwise its hidden states alone are asked for
    batch_invariant: bool = False  # whether a sequence's tokens depend, to the bit, on no other sequence and no chunk
    whole_prompts: bool = False  # whether tokens attend to those after them: a prompt is computed in one step

    def __post_init__(self) -> None:
        check_int("max_model_len", self.max_model_len, 2, 2**24)
        check_int("max_num_seqs", self.max_num_seqs, 1, 2**16)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                "but a step has a token of each sequence; raise it, or lower max_num_seqs"
            )
        if self.whole_prompts and (self.max_num_batched_tokens < self.max_model_len or self.enable_prefix_caching):
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_model_len={self.max_model_len}, or enable_prefix_caching is on, but this model's tokens attend "
                "to those after them: a prompt is computed in one step, and shares nothing; raise "
                "max_num_batched_tokens, or lower max_model_len"
            )
        if self.whole_prompts and any(group.window is not None for group in self.groups):
            raise ValueError(
                "this model's tokens attend to those after them, so that its layers keep all of a prompt; leave window "
                "out of their CacheSpec"
            )
        check_int("block_size", self.block_size, 1, 2**12)
        check_int("num_blocks", self.num_blocks, 1, MOST_BLOCKS)
        check_int("num_shards", self.num_shards, 1, 2**16)
        check_int("min_bucket", self.min_bucket, 1, 8)
        if self.gpu_memory_utilization is not None:
            check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption={self.preemption!r} must be one of {', '.join(PREEMPTIONS)}")
        if self.swap_space is not None:
            check_float("swap_space", self.swap_space, 0.0, 2.0**20)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r:.100} must be one of {', '.join(KV_CACHE_DTYPES)}")
        if self.measures_kv_scales and self.kv_cache_dtype == "auto":
            raise ValueError("calculate_kv_scales is for kv_cache_dtype='fp8' or 'int8'; leave it out, or give one")
        for window, num_pages, is_state in self.groups:
            check_int("window", 1 if window is None else window, 1, 2**24)
            check_int("num_pages", num_pages, 1, 2**16)
            check_int("is_state", int(is_state), 0, 1)
        check_int("seed", self.seed, -(2**63), 2**64 - 1)
        check_int("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        if self.max_model_len > self.longest_len():
            raise ValueError(
                f"max_model_len={self.max_model_len} tokens don't fit the KV pool of {self.num_blocks} blocks "
                f"of {self.block_size} = {self.longest_len()} tokens; lower max_model_len, or raise num_blocks"
            )

    @property
    def most_running(self) -> int:
        """Sequences that run at once in all shards."""
        return self.num_shards * self.max_num_seqs

    @property
    def shares_prompts(self) -> bool:
        """Whether shards can compute one prompt together: each then keeps all of it, as attention that sees everything
        does."""
        is_plain = len(self.groups) == 1 and self.groups[0].window is None and not self.groups[0].is_state
        return self.num_shards > 1 and is_plain and self.generates and not self.whole_prompts

    @property
    def total_tokens(self) -> int:
        """That the pools of all shards hold."""
        return self.num_shards * self.num_blocks * self.block_size

    @property
    def swap_bytes(self) -> int:
        if self.swap_space is None:
            return min(4 << 30, machine_bytes() // 8)
        return int(self.swap_space * 2**30)

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def pages_per_block(self) -> int:
        """Of a block of all groups."""
        return sum(group.num_pages for group in self.groups)

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.pages_per_block

    def count_pages(self, num_blocks: int, num_tokens: int = 1, *, keeps_first: bool = False) -> int:
        """Pages that a sequence of so many blocks holds at once, which is computed `num_tokens` tokens a step. One that
        `keeps_first` keeps all of the first group's blocks."""
        most = [group.most_blocks(num_tokens, self.block_size) for group in self.groups]
        if keeps_first:
            most[0] = None
        each = [num_blocks if limit is None else min(num_blocks, limit) for limit in most]
        return sum(n * group.num_pages for n, group in zip(each, self.groups, strict=True))

    def longest_len(self) -> int:
        """Tokens of the longest sequence that the pool holds."""
        num_blocks = bisect_right(range(MOST_BLOCKS), self.num_pages, key=self.count_pages) - 1
        return num_blocks * self.block_size
