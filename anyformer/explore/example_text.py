"""The text that the page shows first: an example of the run's own data if it is available; and where that data is."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from anyformer.config import ConfigError, io
from anyformer.data.files import locate
from anyformer.data.media import files_in, references_end
from anyformer.data.media_files import PICTURES, SOUNDS
from anyformer.data.readers import read
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import SAMPLED, Data, MixturePart, Recipe, Source
from anyformer.runs.run import Run
from anyformer.tasks.base import media_of

# Texts for a run whose data are not on this machine: the first whose words its tokenizer knows, in the fewest tokens.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time, there was a little girl named Lily. She saw a big dog.",
    "a film with a good story and great actors , but the end is bad",
    "the city is in the north of the country and has a large river",
    "오늘은 날씨가 좋아서 친구와 함께 공원에 갔다.",
    "今天天气很好,我和朋友一起去公园。",
    "今日は天気がいいので、友達と公園に行きました。",
    "Heute ist das Wetter schön, und ich gehe mit einem Freund in den Park.",
    "Aujourd'hui il fait beau et je vais au parc avec un ami.",
    "Hoy hace buen tiempo y voy al parque con un amigo.",
    "3 1 4 1 5 9 2 6",
)
MUCH_SHORTER = 0.8  # a later text is chosen if its tokens per byte are fewer by this factor
MIN_WORDS = 4
SECOND = "A fox jumps."
MAX_CHARACTERS = 80
MAX_VOCABULARY = 1000  # the first ids, which are often the most frequent words


def example(run: Run, folder: Path) -> tuple[str, str]:
    """Return a text, and the second text of a pair if the run reads pairs."""
    row: dict[str, str] = {}
    folders = [Path.cwd()]
    try:
        data = io.load(Recipe, folder / "recipe.toml").data
        row = _row(run, data.valid or data.train, data)
        folders += _folders(data.valid or data.train, data)
    except (ConfigError, OSError):  # no recipe, or its data is not on this machine
        pass
    text = _shorten(row.get("source") or row.get("text") or "") or _any_file(run, folders) or _fitting(run.tokenizer)
    mask = run.tokenizer.mask
    if run.spec.head_kind == "masked_lm" and mask is not None and len(words := text.split(" ")) > 1:
        words[len(words) // 2] = run.tokenizer.token(mask)
        text = " ".join(words)
    return text, _shorten(row.get("pair", "")) or (SECOND if "pair" in getattr(run.spec, "columns", ()) else "")


def _fitting(tokenizer: TextTokenizer) -> str:
    """Return the text of `TEXTS` that fits a vocabulary best, without words that are unknown to it.

    If it knows too few words of each, return its own first words.
    """
    best, least = "", float("inf")
    for text in TEXTS:
        known = _known(tokenizer, text)
        if len(known.split()) < MIN_WORDS:
            continue
        (ids,) = tokenizer.encode_batch([known])
        cost = len(ids) / len(known.encode()) + 1 - len(known) / len(text)
        if cost < MUCH_SHORTER * least:
            best, least = known, cost
    words = (tokenizer.token(id).strip() for id in range(min(tokenizer.size, MAX_VOCABULARY)))
    return best or " ".join(islice((word for word in words if word.isalnum()), 2 * MIN_WORDS)) or TEXTS[0]


def _known(tokenizer: TextTokenizer, text: str) -> str:
    """Return a text without the words that a tokenizer does not know."""
    words = text.split(" ")
    rows = tokenizer.encode_batch(words)
    return " ".join(word for word, ids in zip(words, rows, strict=True) if ids and tokenizer.unk not in ids)


def _any_file(run: Run, folders: Sequence[Path]) -> str:
    """Return the path of an image or sound, if the run reads such a file; those of its data first."""
    store = media_of(run.task)
    if store is None or run.config.image_tower is not None:
        return ""
    suffixes = (*(PICTURES if store.spec.image else ()), *(SOUNDS if store.spec.audio else ()))
    here, *own = folders
    files = chain(*(folder.rglob("*") for folder in own), sorted(here.iterdir()))
    return str(next((path for path in files if path.suffix.lower() in suffixes), ""))


def _row(run: Run, source: Source, data: Data) -> dict[str, str]:
    """Return one of the first rows of a source by column; empty if reading it would take long."""
    if inner := source.inner():
        name = run.spec.name if isinstance(run.spec, MixturePart) else inner[0][1]
        return _row(run, next(part for _, known, part in inner if known == name), data)
    few = source.sample(data)
    columns = {} if few is None else read(few, data, "valid", 0).columns
    texts = columns.get("source") or columns.get("text") or []
    longest = max(range(min(SAMPLED, len(texts))), key=lambda i: len(texts[i]), default=None)
    return {} if longest is None else {role: values[longest] for role, values in columns.items()}


def _shorten(text: str) -> str:
    """Return the longest of the first lines, cut at the end of a word after the last reference."""
    lines = [line.strip() for line in text.splitlines()[:SAMPLED]]
    first = max(lines, key=len, default="")
    end = references_end(first)
    rest = first[end:]
    cut = rest if len(rest) <= MAX_CHARACTERS else rest[:MAX_CHARACTERS].rpartition(" ")[0] or rest[:MAX_CHARACTERS]
    return first[:end] + cut


def media_folders(run: Run, folder: Path) -> tuple[Path, ...]:
    """Return where references of a text may lead: the working directory, the run's data, and the example's files."""
    folders = [Path.cwd()]
    try:
        data = io.load(Recipe, folder / "recipe.toml").data
        folders += [path for source in (data.train, data.valid) if source for path in _folders(source, data)]
    except (ConfigError, OSError):  # as in `example`
        pass
    return (*folders, *(Path(file) for text in example(run, folder) for file in files_in(text)))


def _folders(source: Source, data: Data) -> Iterator[Path]:
    """Yield the folder of each file or folder that a source names."""
    for one in (*(part for _, _, part in source.inner()), source):
        for name in one.files:
            path = locate(getattr(one, name), data)
            yield path if path.is_dir() else path.parent
