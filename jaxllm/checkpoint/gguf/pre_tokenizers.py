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
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐ"
    "ῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
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
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": _GPT4O,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "olmo": PreTokenizer((_GPT2,), is_composed=True),
    "qwen2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": _TEKKEN,
}
