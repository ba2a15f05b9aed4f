"""Statistics of texts: script, lengths, words; and the tokenizer that fits them. Imports no torch."""

import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Script = Literal["Latin", "Hangul", "Han", "Kana", "other"]
SAMPLE = 5000  # texts whose letters are counted
CHARS_PER_PIECE = 100  # characters of training text for each entry of a vocabulary of pieces
PIECES_PER_CHARACTER = 1.3  # at least
MIN_PIECES, MAX_PIECES = 500, 16_000
MAX_PREDICTED_ON_CPU = 4000  # pieces that a model scores at every position, which takes most of a step
MAX_CHARS_FOR_CHARS = 60_000  # text of fewer characters is read by characters: pieces of it would be rare
NAMES: dict[str, Script] = {"LATIN": "Latin", "HANGUL": "Hangul", "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}


@dataclass(frozen=True)
class TextStats:
    """Statistics of all texts of a file, from a sample of them."""

    script: Script  # of most letters
    share: float  # of its letters among all
    characters: int  # of all texts, estimated
    mean_length: float  # characters
    longest: int  # characters
    words: float  # separated by spaces, on average
    alphabet: int  # different characters
    repeated_words: int  # different words that occur at least twice

    @property
    def is_cjk(self) -> bool:
        """True if words are not separated by spaces, or carry endings that make each of them rare."""
        return self.script in ("Hangul", "Han", "Kana")


def measure(texts: list[str], rows: int) -> TextStats:
    """Return the statistics of `rows` texts from those that were read."""
    letters = Counter(c for text in texts[:SAMPLE] for c in text if c.isalpha())
    scripts = Counter[Script]()
    for letter, times in letters.items():
        scripts[NAMES.get(unicodedata.name(letter, "?").partition(" ")[0], "other")] += times
    script, most = scripts.most_common(1)[0] if scripts else ("other", 0)
    words = Counter(word.lower() for text in texts for word in text.split())
    mean = sum(map(len, texts)) / max(1, len(texts))
    return TextStats(
        script=script,
        share=most / max(1, scripts.total()),
        characters=round(mean * rows),
        mean_length=mean,
        longest=max(map(len, texts), default=0),
        words=words.total() / max(1, len(texts)),
        alphabet=len({c for text in texts for c in text}),
        repeated_words=sum(times > 1 for times in words.values()),
    )


def piece_count(stats: TextStats, most: int = MAX_PIECES) -> int:
    """Return the size of a vocabulary of pieces: a power of two times 500, with room for every character."""
    size = MIN_PIECES
    while 2 * size <= min(most, stats.characters / CHARS_PER_PIECE) or size < PIECES_PER_CHARACTER * stats.alphabet:
        size *= 2
    return size


def pieces(stats: TextStats, most: int = MAX_PIECES) -> tuple[str, str]:
    """Return a tokenizer of characters or pieces of words as TOML, and the reason."""
    if stats.characters < MAX_CHARS_FOR_CHARS:
        return '"chars"', f"{stats.characters:,} characters are too few to learn pieces of words"
    size = piece_count(stats, most)
    if stats.is_cjk:
        return f'{{ kind = "unigram", size = {size} }}', f"{stats.script}: pieces of whole characters"
    return f'{{ kind = "bpe", size = {size} }}', f"byte pairs: no text is unknown; {stats.characters:,} characters"


def words(stats: TextStats) -> tuple[str, str]:
    """Return a tokenizer for labelling texts as TOML, and the reason."""
    if stats.is_cjk:
        return pieces(stats)
    return whole_words(stats), f"{stats.repeated_words:,} words occur twice or more"


def whole_words(stats: TextStats) -> str:
    """Return a tokenizer of the words that occur twice or more as TOML."""
    size = min(30_000, max(1000, -(-stats.repeated_words // 1000) * 1000))
    return f'{{ kind = "words", size = {size}, lowercase = true }}'
