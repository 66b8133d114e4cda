"""The engine's state on the device: the KV pool and the slot table. Passed in, donated, returned."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt32

from jaxllm.engine.device.columns import RowLayout, column
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.grammar.matcher import mask_words
from jaxllm.sampling_checks import LOGPROBS_MODES
from jaxllm.sampling_params import BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS

NUM_STOP_IDS = 32
NUM_BAD_WORDS = 2 * MAX_BAD_WORDS  # each with and without a space before it


class Slots(NamedTuple):
    """What every step reads and writes of a running sequence. The host is the allocator, this its mirror."""

    block_tables: tuple[Int[Array, "slots block_pages _width"], ...]  # of each group, by `TableShape`
    length: Int[Array, " slots"]  # tokens whose keys and values the pool holds
    last_token: Int[Array, " slots"]


def _temperature(sequence: Sequence) -> float:
    return 0.0 if sequence.group.chooses_tokens else float(sequence.params.temperature)  # nothing is drawn for a beam


def _min_len(sequence: Sequence) -> int:
    return min(len(sequence.prompt_token_ids) + sequence.params.min_tokens, 2**31 - 1)


def _seed(sequence: Sequence) -> tuple[int, int]:
    return divmod(sequence.seed % 2**64, 2**32)


def _logprobs_mode(sequence: Sequence) -> int:
    return LOGPROBS_MODES.index(sequence.params.logprobs_mode or "raw")


class SamplingTable(NamedTuple):
    """How each slot samples: written when a sequence is admitted, read by the samplers."""

    seed: UInt32[Array, "slots 2"] = column(np.uint32, _seed, 2)
    sample_index: Int[Array, " slots"] = column(np.int32, lambda s: s.sample_index)
    temperature: Float[Array, " slots"] = column(np.float32, _temperature)  # 0 is greedy
    top_k: Int[Array, " slots"] = column(np.int32, lambda s: max(s.params.top_k, 0))  # 0 is all
    top_p: Float[Array, " slots"] = column(np.float32, lambda s: s.params.top_p)
    min_p: Float[Array, " slots"] = column(np.float32, lambda s: s.params.min_p)
    # For the full sampler alone:
    prompt_len: Int[Array, " slots"] = column(np.int32, lambda s: len(s.prompt_token_ids))
    min_len: Int[Array, " slots"] = column(np.int32, _min_len)  # tokens before which `stop_ids` are masked
    stop_ids: Int[Array, "slots stop_ids"] = column(np.int32, lambda s: sorted(s.stop_ids), NUM_STOP_IDS, fill=-1)
    has_rules: Int[Array, " slots"] = column(np.int32, lambda s: s.params.has_rules)  # 1 if its row of the rules counts
    wants_logprobs: Int[Array, " slots"] = column(np.int32, lambda s: s.params.tracks_logprobs)  # 1 or 0
    logprobs_mode: Int[Array, " slots"] = column(np.int32, _logprobs_mode)  # of `LOGPROBS_MODES`
    is_beam: Int[Array, " slots"] = column(np.int32, lambda s: s.group.chooses_tokens)  # 1 or 0
    repetition_penalty: Float[Array, " slots"] = column(np.float32, lambda s: s.params.repetition_penalty, fill=1)
    frequency_penalty: Float[Array, " slots"] = column(np.float32, lambda s: s.params.frequency_penalty)
    presence_penalty: Float[Array, " slots"] = column(np.float32, lambda s: s.params.presence_penalty)


def _mask(sequence: Sequence) -> np.ndarray:
    """One bit for each token, up to the last that is allowed."""
    ids = sequence.params.allowed_token_ids or []
    bits = np.zeros(max(ids, default=-1) // 32 * 32 + 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bad_words(sequence: Sequence) -> np.ndarray:
    words = np.full((len(sequence.bad_words), BAD_WORD_LEN), -1, np.int32)
    for row, word in zip(words, sequence.bad_words, strict=True):
        row[-len(word) :] = word
    return words


class LogitRules(NamedTuple):
    """What changes the logits of the few slots that ask for it, and whose log-probabilities they want by name."""

    has_mask: Int[Array, " slots"] = column(np.int32, lambda s: s.params.allowed_token_ids is not None)  # 1 or 0
    mask: Int[Array, "slots mask_words"] = column(np.int32, _mask, "mask_words")  # a bit for each token that may be
    bias_ids: Int[Array, "slots biases"] = column(
        np.int32, lambda s: [*(s.params.logit_bias or ())], MAX_LOGIT_BIAS, fill=-1
    )
    bias: Float[Array, "slots biases"] = column(
        np.float32, lambda s: [*(s.params.logit_bias or {}).values()], MAX_LOGIT_BIAS
    )
    bad_words: Int[Array, "slots bad_words word_len"] = column(
        np.int32, _bad_words, NUM_BAD_WORDS, BAD_WORD_LEN, fill=-1
    )
    logprob_ids: Int[Array, "slots logprob_ids"] = column(
        np.int32, lambda s: s.params.logprob_token_ids or (), MAX_LOGPROB_TOKEN_IDS
    )


SAMPLING_LAYOUT = RowLayout(SamplingTable)


def rules_layout(vocab: int) -> RowLayout:
    return RowLayout(LogitRules, (("mask_words", mask_words(vocab)),))


class DeviceState(NamedTuple):
    """One pytree. (No dataclass: its fields also hold shapes and shardings while executables are lowered.)"""

    kv_pools: list[Shaped[Array, "pages ..."]]  # by `CacheLayout`
    history: Int[Array, "pages block_size"]  # the token of each position in the first group's blocks
    slots: Slots
    sampling: Int[Array, "slots _words"]  # packed rows of the `SamplingTable`
    rules: LogitRules
    hidden: Float[Array, "tokens embed"]  # of the last step: samplers and prompt log-probabilities read it
    sums: Float[Array, "slots embed"]  # of the hidden states so far, of sequences that are pooled

    @property
    def pools(self) -> list[Any]:
        """What moves when a page does."""
        return [*self.kv_pools, self.history]


def empty_slots(max_num_seqs: int, tables: Seq[tuple[int, int]]) -> Slots:
    """`tables` are of each group the pages of a block, and the width of its block tables."""
    ints = jnp.zeros(max_num_seqs, jnp.int32)
    return Slots(tuple(jnp.zeros((max_num_seqs, *shape), jnp.int32) for shape in tables), ints, ints)
