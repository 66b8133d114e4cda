"""SentencePiece models (`tokenizer.model`): builds the equivalent fast tokenizer; the library is the reference."""

from pathlib import Path

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.text.fast_parts import SPACE, merges_by_score

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # of a piece
_UNIGRAM, _BPE = 1, 2  # of a model
_UNKNOWN_PENALTY = 10  # SentencePiece's own, below the worst score
_NOT_CUT = (_UNKNOWN, _CONTROL, _USER_DEFINED)


class SentencePieceSource:
    """A `TokenizerSource`. `is_legacy`: each text part between special tokens begins with a space."""

    def __init__(self, file: Path, *, is_legacy: bool):
        try:
            self._proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
            self._processor = _load(self._proto)
        except (DecodeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{file} is not a sound SentencePiece model ({error}); download it again") from error
        self._check(file)
        self.has_ties = self._proto.trainer_spec.model_type == _UNIGRAM
        self._normalizer = self._proto.normalizer_spec
        self._prefixes = self._normalizer.add_dummy_prefix
        self._is_legacy = is_legacy
        bare = sentencepiece_model_pb2.ModelProto.FromString(self._proto.SerializeToString())
        bare.normalizer_spec.add_dummy_prefix = False
        self._bare_processor = _load(bare)
        self.special_names = self._special_names()
        self.own_added = tuple(self._added(piece) for piece in self._proto.pieces if piece.type in _NOT_CUT)
        self.pieces = [piece.piece.replace(SPACE, " ") for piece in self._proto.pieces if piece.type == _NORMAL]

    def _check(self, file: Path) -> None:
        kind = self._proto.trainer_spec.model_type
        if kind not in (_UNIGRAM, _BPE):
            raise ValueError(f"{file} is a SentencePiece model of type {kind}; only BPE and unigram are converted")
        if any(piece.type == _UNUSED for piece in self._proto.pieces):
            raise ValueError(f"{file} has unused pieces (a restricted vocabulary), which have no counterpart")

    def _special_names(self) -> dict[str, str]:
        ids = {key: getattr(self._processor, f"{key}_id")() for key in ("bos", "eos", "unk", "pad")}
        return {f"{key}_token": self._proto.pieces[i].piece for key, i in ids.items() if i >= 0}

    def _added(self, piece) -> AddedToken:
        if piece.type == _USER_DEFINED:
            # They are matched in the normalised text. A dummy prefix would be added before each of them too.
            return AddedToken(piece.piece, normalized=not self._prefixes, special=False)
        return AddedToken(piece.piece, normalized=False, special=True)

    def backend(self) -> Tokenizer:
        backend = Tokenizer(self._unigram() if self.has_ties else self._bpe())
        backend.normalizer = self._fast_normalizer()
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._prefixes:
            steps.append(decoders.Strip(" ", 1, 0))
            if not self._is_legacy:
                backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _bpe(self) -> models.BPE:
        vocabulary = {piece.piece: i for i, piece in enumerate(self._proto.pieces)}
        unknown = self._proto.pieces[self._processor.unk_id()].piece
        byte_fallback = self._proto.trainer_spec.byte_fallback
        merges = merges_by_score({piece.piece: piece.score for piece in self._proto.pieces if piece.type == _NORMAL})
        return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)

    def _unigram(self) -> models.Unigram:
        pieces = self._proto.pieces
        worst = min(piece.score for piece in pieces if piece.type == _NORMAL)
        # Byte pieces must never match a text, so their names score below everything else.
        longest = max(len(piece.piece) for piece in pieces)
        never = longest * (worst - _UNKNOWN_PENALTY)
        scores = [(piece.piece, piece.score if piece.type == _NORMAL else never) for piece in pieces]
        return models.Unigram(scores, self._processor.unk_id(), self._proto.trainer_spec.byte_fallback)

    def _fast_normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self._normalizer.precompiled_charsmap:
            steps.append(normalizers.Precompiled(self._normalizer.precompiled_charsmap))
        if self._normalizer.remove_extra_whitespaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if self._prefixes and self._is_legacy:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def encode(self, segment: str, is_first: bool) -> list[int]:
        if self._is_legacy or is_first and not segment.startswith((" ", SPACE)):
            return self._processor.encode(segment)
        return self._bare_processor.encode(segment)

    def decode(self, ids: list[int]) -> str | None:
        return None if self._processor.unk_id() in ids else self._processor.decode(ids)


def _load(proto) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())  # the constructor treats an empty model as none
    return processor
