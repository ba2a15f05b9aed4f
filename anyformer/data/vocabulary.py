"""Learning a vocabulary from texts: characters, bytes, words, byte pairs, unigrams, word pieces. Imports no torch.

The same texts give the same vocabulary, in any process and on any number of cores.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from anyformer import recipe
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.recipe import SPECIAL as SPECIAL

# A word for byte pairs and unigrams: letters or digits with their marks, or anything else, each with the space before
# it; then other spaces. (GPT-2's pattern parts letters from their marks, which is no good for Hindi.) No special token
# is such a word, so that a text cannot spell one.
WORD = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}[\p{N}\p{M}]*| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = "\U0010ffff"  # no character, and in no text


def _bytecharacters() -> dict[str, int]:
    """GPT-2's visible character for each byte: itself, or the next one free from Ā on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(other)}


BYTES = _bytecharacters()


def with_special(inner: Tokenizer) -> Tokenizer:
    """Return a tokenizer that has all special tokens."""
    inner.add_special_tokens(list(SPECIAL))
    return inner


def characters(spec: recipe.Characters, texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    inner = Tokenizer(models.BPE())
    steps = [*([normalizers.NFD()] if spec.decompose else []), *([normalizers.Lowercase()] if spec.lowercase else [])]
    symbols = {*spec.symbols}
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
        seen = {c for found in seen for c in inner.normalizer.normalize_str(found)}
        symbols = set(map(inner.normalizer.normalize_str, symbols))
    if symbols:  # the longest one that fits, or a character: never a special token
        pattern = "|".join(map(re.escape, sorted(symbols, key=lambda symbol: (-len(symbol), symbol))))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pattern}|[\s\S]"), "isolated")
    # `ignore_merges`: a piece that is a token is not cut into characters.
    vocab = _numbered(*SPECIAL, *sorted(seen | symbols))
    inner.model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", ignore_merges=bool(symbols))
    inner.decoder = decoders.Fuse()
    return inner


def all_bytes() -> Tokenizer:
    inner = Tokenizer(models.BPE(vocab=_numbered(*SPECIAL, *sorted(BYTES, key=BYTES.__getitem__)), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def words(spec: recipe.Words, texts: Iterable[str]) -> Tokenizer:
    """Yield the words of texts; a special token written in a text is cut after its `<`, and so becomes two words."""
    _at_least(spec, len(SPECIAL) + 1)
    inner = Tokenizer(models.WordLevel(vocab={}, unk_token="<unk>"))
    if spec.lowercase:
        inner.normalizer = normalizers.Lowercase()
    cut = pre_tokenizers.Split(Regex(rf"\A<(?=(?:{'|'.join(name[1:] for name in SPECIAL)})\z)"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), cut])
    trainer = trainers.WordLevelTrainer(vocab_size=spec.size, special_tokens=list(SPECIAL), show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return inner


def byte_pairs(spec: recipe.BPE, texts: Iterable[str]) -> Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) over bytes (Radford et al. 2019)."""
    _at_least(spec, len(SPECIAL) + len(BYTES))
    inner = Tokenizer(models.BPE())
    if spec.lowercase:
        inner.normalizer = normalizers.Lowercase()
    words = pre_tokenizers.Split(Regex(WORD), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.size,
        min_frequency=2,  # a pair seen once is not worth a token
        special_tokens=list(SPECIAL),
        initial_alphabet=list(BYTES),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def unigrams(spec: recipe.Unigram, texts: Iterable[str]) -> Tokenizer:
    """Pieces with probabilities (Kudo 2018). Like SentencePiece it puts a space before the text; decoding takes it off.

    Spaces stay spaces inside the pieces, so that a ▁ in a text stays a ▁. Characters never seen are written as bytes.
    """
    fixed = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.Unigram())
    prefix = normalizers.Prepend(" ")
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), prefix]) if spec.lowercase else prefix
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    counts = _counted(inner, texts)
    _at_least(spec, len(fixed) + len({c for word, _ in counts for c in word}))
    # The trainer takes for pieces only what continues in two ways or more, which a whole word does not: END is another.
    words = ([word] * n + [word + END] * (n > 1) for word, n in counts)
    size = spec.size - len(fixed) + 2  # with <unk> and END, which go again
    trained = Tokenizer(models.Unigram())
    trained.train_from_iterator(words, trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", show_progress=False))
    scores = {p: score for p, score in json.loads(trained.to_str())["model"]["vocab"] if p not in ("<unk>", END)}
    # The trainer adds up in the order of a hash: the last digits differ from run to run, and so do the scores of rare
    # characters, which it sets 1e-4 apart. The former are rounded off, the latter made one.
    least = min(scores.values())
    rare = least + 1e-4 * sum(len(piece) == 1 for piece in scores)
    pieces = {p: round(least if len(p) == 1 and score < rare else score, 6) for p, score in scores.items()}
    # It may also give too many: single characters stay.
    kept = sorted(pieces.items(), key=lambda piece: (len(piece[0]) > 1, -piece[1], piece[0]))[: spec.size - len(fixed)]
    vocab = [*((name, 0.0) for name in fixed), *sorted(kept, key=lambda piece: (-piece[1], piece[0]))]
    inner.model = models.Unigram(vocab, unk_id=SPECIAL.index("<unk>"), byte_fallback=True)
    return inner


def word_pieces(spec: recipe.WordPiece, texts: Iterable[str]) -> Tokenizer:
    """BERT's (Devlin et al. 2019): words and marks apart, then the longest known pieces. Accents stay."""
    inner = Tokenizer(models.WordPiece())
    inner.normalizer = normalizers.BertNormalizer(lowercase=spec.lowercase, strip_accents=False)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)  # which would write "do not" as "don't"
    counts = _counted(inner, texts)
    _not_empty(bool(counts))
    # The trainer numbers the characters inside words in the order of a hash, and breaks ties by these numbers, unless
    # they are there from the beginning.
    inside = sorted({f"##{c}" for word, _ in counts for c in word[1:]})
    trainer = trainers.WordPieceTrainer(
        vocab_size=spec.size, min_frequency=2, special_tokens=[*SPECIAL, *inside], show_progress=False
    )
    trained = Tokenizer(models.WordPiece())
    trained.train_from_iterator(([word] * n for word, n in counts), trainer)
    vocab = trained.get_vocab(with_added_tokens=False)
    _at_least(spec, len(vocab))
    inner.model = models.WordPiece(vocab, unk_token="<unk>")
    return inner


def segments(spec: recipe.Segmented, texts: Iterable[str]) -> Tokenizer:
    """The most frequent tokens that the spec cuts from texts; of equally frequent ones, the first in order."""
    _at_least(spec, len(SPECIAL) + 1)
    counts = Counter(token for text in texts for token in spec.segment(text) if token not in SPECIAL)
    kept = sorted(counts, key=lambda token: (-counts[token], token))[: spec.size - len(SPECIAL)]
    inner = Tokenizer(models.WordLevel(vocab=_numbered(*SPECIAL, *kept), unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return inner


def _counted(inner: Tokenizer, texts: Iterable[str]) -> list[tuple[str, int]]:
    """The words of texts and how often each is there, in order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)))
    return sorted(counts.items())


def _numbered(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _at_least(spec: recipe.LearnedVocabulary, least: int) -> None:
    if spec.size < least:
        raise ConfigError([Fault("size", f"= {spec.size}: {spec.kind} needs at least {least} for these texts")])


def some_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts, each checked; a `ConfigError` at their end if there was nothing in them."""
    empty = True
    for text in texts:
        empty = not checked(text).strip() and empty
        yield text
    _not_empty(not empty)


def _not_empty(something: bool) -> None:
    if not something:
        raise ConfigError([Fault("", "there is no text to train a tokenizer on")])


def checked(text: object) -> str:
    """The text, if it is one that can be written down; the library would stop with less of a reason."""
    if not isinstance(text, str):
        raise ConfigError([Fault("", f"a text must be a string, not {type(text).__name__}")])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"'{visible(text[error.start])}' at position {error.start}"
        raise ConfigError([Fault("", f"the text holds half a character (a lone surrogate): {half}")]) from None
    return text


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit the library to one core, here and in forked processes: there is one process per core."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
