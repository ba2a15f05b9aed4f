"""Lines of text for tokenizers: 2,000 in six groups, the same in every Python, and texts to train small models on."""

import random

WORDS = {
    "korean": "안녕하세요 반갑습니다 오늘은 날씨가 정말 좋네요 한국어 문장을 읽는다 "
    "ㅋㅋㅋ ㅠㅠ 값이 훑어보다 그리고 우리는 \u1100\u1161\u11a8 \u1112\u1161\u11ab\u1100\u116e\u11a8 학교에 갔다 ㅎㅎ",
    "chinese": "中文 句子 没有空格 因此很长的一个句子 今天天气很好 我们去公园 "
    "謝謝 你好世界 学习 １２３ 。 ， ！ 「引号」 ㎏ ①②",
    "german": "Straße über Größe Mädchen schön Übung daß heißt Grüße Äpfel der die das und nicht ist ein eine "
    "ü a\u0308 Ö u\u0308ber ﬁnal 3,14 1.000,50 2024-01-01 E-Mail „so“ ẞ ½ don't ``quoted'' 9,9 2000, STRASSE ΟΔΟΣ",
    "arabic": "مرحبا بالعالم كيف حالك اليوم السَّلَامُ عَلَيْكُمْ لا شكرا ﷽ ﷺ لله العربية لغة ١٢٣ ؟ ، ﻻ محمّد",
    "emoji": "👍🏽 👩‍👩‍👧 🇰🇷 🏳️‍🌈 😀 😂😂😂 ❤️ 👨🏿‍🚀 1️⃣ 🇩🇪🇸🇦 🫠 ok lol :-) the of it's 🤷🏽‍♀️ ☕ ️ ‍",
    "spaces": "a b  c 한 글 中 문 x\u00a0y \u3000 \u2003 \u200b z\u200bz \ufeff \u2028 \u200d e\u0301 ¨ … ▁ ▁▁ word",
}
GAPS = [" "] * 12 + ["", "", "  ", "\u00a0", "\u3000"]
ODD_GAPS = ["   ", "\t", "\n", "\r\n", "\r", "\u200b", "\u200d", "\ufeff", "\u2028", "\u2003", " \u3000 ", "▁"]
ODD_GAPS += ["\x00", "\x01", "\x7f", "\x1f", "\x85", " \n\n ", "\t\t", "\x0b"]
RANGES = {
    "korean": ((0xAC00, 0xD7A3), (0x1100, 0x11FF), (0x3130, 0x318F)),
    "chinese": ((0x4E00, 0x9FFF), (0x3000, 0x303F), (0xFF00, 0xFFEF)),
    "german": ((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F)),
    "arabic": ((0x600, 0x6FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)),
    "emoji": ((0x1F300, 0x1FAFF), (0x1F1E6, 0x1F1FF), (0x2600, 0x27BF)),
    "spaces": ((0x2000, 0x206F), (0, 0x9F), (0, 0xD7FF)),
}
RUNS = {"korean": "ㅋㅠ하", "chinese": "哈。一", "german": "ahß!", "arabic": "هـ؟", "emoji": "😂❤🇰", "spaces": " ▁.a\t"}
SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    "<mask>",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "<extra_id_0>",
    "<mask_1>",
    "__en__",
    "en_XX",
    "<bos>",
]


def lines() -> dict[str, list[str]]:
    """Return the lines of each group; the last two spell added and special tokens."""
    found = {name: _group(name, 335, odd=True) for name in WORDS}
    found["added"] = [
        "<|new|>",
        "a <|new|> b",
        "한<|new|><|new|>국",
        "  <|new|>",
        "x<|new|>  ",
        ">>deu<< Straße",
        ">>a<< b",
    ]
    rng = random.Random("special")
    found["special"] = ["".join(_pick(rng, [*SPECIAL, " ", "x", " 한"]) for _ in range(4)) for _ in range(20)]
    return found


def training_lines() -> list[str]:
    """Return lines of words alone, on which small models are trained."""
    return [line for name in WORDS for line in _group(name, 250, odd=False)]


def _group(name: str, count: int, odd: bool) -> list[str]:
    rng = random.Random(f"{name} {odd}")
    return [_line(rng, name, odd) for _ in range(count)]


def _line(rng: random.Random, name: str, odd: bool) -> str:
    gaps = GAPS + (ODD_GAPS * (2 if name == "spaces" else 1) if odd else [])
    line = "".join(_word(rng, name, odd) + _pick(rng, gaps) for _ in range(1 + int(4 * rng.random())))
    return _pick(rng, gaps) + line if odd and rng.random() < 0.2 else line


def _word(rng: random.Random, name: str, odd: bool) -> str:
    draw = rng.random()
    if not odd or draw < 0.65:
        return _pick(rng, WORDS[name].split(" "))
    if draw < 0.8:
        return _pick(rng, [*RUNS[name]]) * (2 + int(7 * rng.random()))
    first, last = _pick(rng, list(RANGES[name]))
    return "".join(chr(first + int((last - first + 1) * rng.random())) for _ in range(1 + int(3 * rng.random())))


def _pick(rng: random.Random, options: list) -> str:
    return options[int(len(options) * rng.random())]
