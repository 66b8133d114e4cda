"""Texts that tokenizers split differently if a rule of theirs is read wrongly."""

TEXTS = (
    "",
    " ",
    "\n",
    "  leading, and trailing  ",
    "\r\n\r\n1st\r\n2nd\t\t3rd\n\n\n",
    "one\u00a0two\u2003three\u3000four\u200bfive\ufeffsix",  # spaces that are not ASCII's, and none at all
    "It's we're I'LL you'd they'Ve don’t l'été",
    "1234567890 3.14159 1,000,000 ２０２６ ٣٤٥ ½ x² Ⅻ",
    "snake_case camelCase SCREAMING_CASE kebab-case HTTPServer2Go",
    "def f(x):\n    return {\n\t'a': [1, 2],\n    }  # comment\n\n\n\nclass A: ...",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\path\\file.txt",
    "<p>text</p> <!-- a --> &amp; ${x} {{y}} {% z %} [INST] <<SYS>> ▁ Ġ Ċ <0x0A>",
    "naïve café Ångström e\u0301 (composed of two) ﬁ ligature ǅ ß ẞ İ ı",
    "Привет, мир! Ελληνικά עברית العربية فارسی हिन्दी தமிழ் ไทย ខ្មែរ አማርኛ",
    "中文繁體与简体，日本語のひらがなカタカナ、한국어 띄어쓰기",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ☃️ 🫠 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "a" * 300 + " " + "ab" * 100 + "!" * 50 + " " * 33 + "\n" * 17 + "=" * 80,
    "\x00\x01\x07\x1b[0m\x7f\x85\u2028\u2029",
    "lone combining \u0301\u0308 and \ufffd, private \ue000, noncharacter \ufffe",
    "…—–‘’“”«»‹›•·×÷≠≤≥∞∑∫√∂ℝ→⇒∀∃",
    "Zalgo: Z̸̢̡a̷̛l̶̕g̸̢o̵̡ and ﷽ and ꧅",
)
