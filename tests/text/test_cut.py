"""Pairs of texts and texts cut to a length, against transformers, for the three kinds of encoders' tokenizers."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.tokenizer import Tokenizer

WORDS = [chr(97 + i) for i in range(26)]


def word_piece():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *(f"##{word}" for word in WORDS)]
    backend = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(names[:4])
    return backend


def unigram():
    """As XLM-RoBERTa's."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram([*pieces, *((word, -2.0) for word in WORDS)], unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return backend


def byte_level():
    """As ModernBERT's, with the processor of RoBERTa's."""
    names = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    backend.add_special_tokens(names[:3])
    return backend


KINDS = (word_piece, unigram, byte_level)
TEXTS = ("", "a", "b c", "some words", "a far longer text of many more words than the others have")


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def both(request):
    transformers = pytest.importorskip("transformers")
    return Tokenizer(request.param()), transformers.PreTrainedTokenizerFast(tokenizer_object=request.param())


def test_texts_have_the_special_tokens_and_need_no_end_of_sequence(both):
    ours, theirs = both
    assert ours.eos_token_id is None
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_texts_are_cut(both):
    ours, theirs = both
    for text in TEXTS:
        for max_len in (3, 4, 7, 200):
            for side in ("right", "left"):
                theirs.truncation_side = side
                want = theirs(text, truncation=True, max_length=max_len)["input_ids"]
                assert ours.encode_within(text, max_len, side) == want
    theirs.truncation_side = "right"


def test_pairs(both):
    ours, theirs = both
    for first in TEXTS:
        for second in TEXTS[1:]:  # transformers takes an empty one for none
            assert ours.encode_pair(first, second) == theirs(first, second)["input_ids"]
            for max_len in (6, 7, 11, 12, 20, 200):
                want = theirs(first, second, truncation="longest_first", max_length=max_len)["input_ids"]
                assert ours.encode_pair(first, second, max_len) == want, (first, second, max_len)


def test_what_cannot_be_encoded(both):
    ours, _ = both
    with pytest.raises(ValueError, match="at most 2 tokens are wanted, but 2 special tokens"):
        ours.encode_within("a", 2)
    with pytest.raises(ValueError, match="special tokens go with any text"):
        ours.encode_pair("a", "b", 3)
    with pytest.raises(ValueError, match="half of a surrogate pair at character 2"):
        ours.encode_pair("ab", "\ud800")


@pytest.mark.parametrize(
    ("kind", "config", "tells"),
    [
        (word_piece, {}, True),
        (word_piece, {"tokenizer_class": "BertTokenizer"}, True),
        (word_piece, {"tokenizer_class": "TokenizersBackend"}, False),
        (word_piece, {"tokenizer_class": "TokenizersBackend", "model_input_names": ["token_type_ids"]}, True),
        (word_piece, {"model_input_names": ["input_ids"]}, False),
        (unigram, {}, False),
    ],
)
def test_types_of_pairs(tmp_path, kind, config, tells):
    kind().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_dir(tmp_path).tells_pairs is tells


class Letters:
    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_tokenizers_of_others_cut_nothing():
    ours = wrap(Letters())
    assert ours.encode_within("ab", 2) == [97, 98]
    with pytest.raises(ValueError, match="has 3 tokens, more than 2, and a tokenizer of type Letters"):
        ours.encode_within("abc", 2)
    with pytest.raises(ValueError, match="Letters, without a tokenizer.json, encodes no pairs"):
        ours.encode_pair("a", "b")
