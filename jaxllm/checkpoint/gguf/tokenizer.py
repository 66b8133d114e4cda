"""Builds the fast tokenizer that a GGUF file's metadata describes."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from jaxllm.checkpoint.gguf.metadata import Metadata
from jaxllm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxllm.checkpoint.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from jaxllm.errors import ModelFormatError
from jaxllm.text import tokenizer as text
from jaxllm.text.chat_template import ChatTemplates, parse_templates
from jaxllm.text.fast_parts import SPACE, bos_and_eos, merges_by_score

_TEMPLATE = "tokenizer.chat_template"
_MAX_PIECE = 1024  # characters: the merges of a piece take time by the square of its length
# Phi-3's other special tokens take the white space after them, which the file does not say.
_PHI3_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def read_tokenizer(metadata: Metadata) -> text.Tokenizer:
    """The tokenizer, with the file's chat templates. Raises `ModelFormatError`."""
    vocabulary = Vocabulary(metadata)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        raise metadata.error("tokenizer.ggml.model", f"is not supported; supported: {', '.join(builders)}")
    if len(set(vocabulary.tokens)) < len(vocabulary.tokens):
        raise ModelFormatError(f"{metadata.file}: tokenizer.ggml.tokens has a token twice; convert the model again")
    try:
        backend = builders[vocabulary.model](vocabulary)
        backend.encode("a")  # some damage shows only when encoding
    except ModelFormatError:
        raise
    except Exception as error:  # the library raises the bare class
        raise ModelFormatError(
            f"{metadata.file} holds no sound tokenizer ({error}); download it again, or convert the model again"
        ) from error
    names = {name: _token(backend, token) for name, token in vocabulary.special_ids.items()}
    return text.Tokenizer(backend, eos_token=names.get("eos_token"), chat=ChatTemplates(_templates(metadata), names))


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's byte-level BPE."""
    metadata, key = vocabulary.metadata, "tokenizer.ggml.pre"
    if key not in metadata:
        raise ModelFormatError(f"{metadata.file} lacks the key {key}: how text is cut is not known; convert it again")
    if metadata.text(key) not in PRE_TOKENIZERS:
        raise metadata.error(key, f"is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[metadata.text(key)]
    stored = metadata.strings("tokenizer.ggml.merges")
    cuts = [merge.find(" ", 1) for merge in stored]
    if -1 in cuts:
        raise ModelFormatError(f"{metadata.file}: tokenizer.ggml.merges must hold two parts each; convert it again")
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(stored, cuts, strict=True)]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=pre.ignores_merges))
    if pre.is_composed:
        backend.normalizer = pre.normalizer()
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([_added(vocabulary, i) for i in _added_ids(vocabulary)])
    _add_bos_and_eos(backend, vocabulary, bos=pre.adds_bos)
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's BPE, whose merges follow from the scores. A space goes before each text, and before the text
    after a special token, unless the file says otherwise."""
    has_prefix = vocabulary.adds("space_prefix", True)
    kinds, tokens = vocabulary.kinds, list(vocabulary.tokens)
    added = {i: _added(vocabulary, i) for i in _added_ids(vocabulary)}
    if not has_prefix:  # such tokens are matched in the text after its spaces were replaced; the file spells them out
        spelled = {i: tokens[i].replace(" ", SPACE) for i in added if kinds[i] == USER_DEFINED}
        known = set(tokens)
        for i, token in spelled.items():
            if token == tokens[i] or token not in known:
                tokens[i], added[i] = token, AddedToken(token, normalized=True, special=False)
    ids = {token: i for i, token in enumerate(tokens)}
    scores = {t: s for t, s, kind in zip(tokens, vocabulary.scores, kinds, strict=True) if kind == NORMAL}
    longest = max(map(len, scores), default=0)
    if longest > _MAX_PIECE:
        raise ModelFormatError(
            f"{vocabulary.metadata.file}: tokenizer.ggml.tokens has one of {longest} characters; at most {_MAX_PIECE} "
            "are read: download the file again"
        )
    unknown = vocabulary.special_ids["unk_token"]
    model = models.BPE(
        ids, merges_by_score(scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=BYTE in kinds
    )
    backend = Tokenizer(model)
    before = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(list(added.values()))
    _add_bos_and_eos(backend, vocabulary, bos=True)
    return backend


def _added_ids(vocabulary: Vocabulary) -> list[int]:
    """The tokens that are found in a text before it is cut, by id."""
    stops = {*vocabulary.stop_ids, *(vocabulary.special_ids.get(name) for name in ("bos_token", "eos_token"))}
    return [i for i, kind in enumerate(vocabulary.kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED) or i in stops]


def _added(vocabulary: Vocabulary, i: int) -> AddedToken:
    token, kind = vocabulary.tokens[i], vocabulary.kinds[i]
    is_phi3 = vocabulary.model == "llama" and vocabulary.metadata.text("general.architecture") == "phi3"
    takes_space = is_phi3 and token not in _PHI3_KEEP_SPACE
    return AddedToken(token, normalized=False, special=kind != USER_DEFINED, rstrip=takes_space)


def _add_bos_and_eos(backend: Tokenizer, vocabulary: Vocabulary, *, bos: bool) -> None:
    parts: list[list[tuple[str, int]]] = []
    for name, default in (("bos", bos), ("eos", False)):
        token = vocabulary.special_ids.get(f"{name}_token")
        is_added = vocabulary.adds(name, default)
        if is_added and token is None:
            raise vocabulary.metadata.error(f"tokenizer.ggml.{name}_token_id", f"is needed, as {name} tokens are added")
        parts.append([(_token(backend, token), token)] if is_added and token is not None else [])
    if any(parts):
        backend.post_processor = bos_and_eos(*parts)


def _token(backend: Tokenizer, token: int) -> str:
    name = backend.id_to_token(token)
    assert name is not None
    return name


def _templates(metadata: Metadata) -> dict[str, str]:
    stored: dict[str, Any] = {}
    for name in metadata.strings("tokenizer.chat_templates", []):
        stored[name] = metadata.text(f"{_TEMPLATE}.{name}")
    if _TEMPLATE in metadata:
        stored["default"] = metadata.text(_TEMPLATE)
    try:
        return parse_templates(stored, str(metadata.file))
    except ValueError as error:
        raise ModelFormatError(str(error)) from error
