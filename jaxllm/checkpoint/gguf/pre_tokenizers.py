"""How byte-level tokenizers cut a text into words before they merge, by the names that GGUF files have for it."""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"
_THREE_DIGITS = r"[0-9][0-9][0-9]"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Of Llama 3 and those after it, which differ in how many digits make a word."""
    return rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _cased_words(digits: str, end: str) -> str:
    """Of tokenizers that also cut before an upper-case letter."""
    cased = f"{_LEAD}{_UPPER}*{_LOWER}+{end}|{_LEAD}{_UPPER}+{_LOWER}*{end}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


# The letters that DeepSeek's first tokenizer knows: those of scripts with case.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _REST,
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` cut one after the other: what one finds is a word, and what lies between is cut by the next.

    With `ignores_merges` a word that is a token is never built from others. `is_composed`: the text is brought to
    Unicode's form NFC before.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False  # where the file does not say
    is_composed: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, letters])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.is_composed else None


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words(_DIGITS),), is_composed=True)
_TEKKEN = PreTokenizer((_cased_words(_DIGITS, ""),), ignores_merges=True, adds_bos=True)
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS))
_SINGLE_DIGITS = PreTokenizer((_DIGITS, _GPT2))

PRE_TOKENIZERS = {  # by `tokenizer.ggml.pre`
    "command-r": PreTokenizer((_DIGITS, _GPT2), is_composed=True),
    "dbrx": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-r1-qwen": PreTokenizer((_words(_DIGITS),)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "default": _DEFAULT,
    "falcon": _FALCON,
    "falcon3": _LLAMA3,
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": _GPT4O,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "minerva-7b": _SINGLE_DIGITS,
    "olmo": PreTokenizer((_GPT2,), is_composed=True),
    "phi-2": PreTokenizer((_GPT2,)),
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smaug-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": _TEKKEN,
}
