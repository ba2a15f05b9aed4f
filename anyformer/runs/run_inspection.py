"""Texts as model inputs: encode a text the way a run's model reads it, with the names of its tokens."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, IdInput, Input, Media, ModelConfig, Side
from anyformer.data.batch import Example
from anyformer.data.media import Segment, references_end
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.generate import NonFiniteLogits, run_sampling
from anyformer.generation.request import Request
from anyformer.kernels.conventions import PLAIN
from anyformer.nn.inspection import attention_maps as maps
from anyformer.nn.model import Transformer
from anyformer.runs.run import Run
from anyformer.tasks.base import Writer, before_end, check_media, ending_ids, length_fault, media_of, read_media

BYTE = re.compile("<0x([0-9A-F]{2})>")
LEADS = ((4, 0xF0), (3, 0xE0), (2, 0xC0))  # bytes of a character in UTF-8, by its first byte
MOST = 1024  # tokens of a text at most: every map of a layer has t·s elements per head


@dataclass(frozen=True)
class Reading:
    """One text as a batch of size 1, for `run.model(*reading.inputs, **reading.options)`."""

    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    tokens: dict[Side, list[str]]  # tokens of each stack, as `tokenizer.token` shows them, and labels of other places
    segments: dict[Side, list[Segment]] = field(default_factory=dict)  # images, sounds and feature vectors
    notes: tuple[str, ...] = ()  # one line for each part that was cut off
    text: str = ""  # the part of the text that is read
    begins: int | None = None  # generative models: the number of tokens before the answer

    def distinct_ids(self, side: Side) -> Tensor:
        """Return the ids of a stack [1, t]; places of segments have distinct negative ids."""
        given = self.inputs[list(self.tokens).index(side)]
        ids = given.cpu().clone() if given.dim() == 2 else torch.zeros(1, len(self.tokens[side]), dtype=torch.long)
        for one in self.segments.get(side, ()):
            ids[0, one.start : one.stop] = -1 - torch.arange(one.start, one.stop)
        return ids


def read(run: Run, text: str, target: str | None = None) -> Reading:
    """Encode a text as in training, cut at the model's last position, and a target after it or in the decoder.

    Without a target, a sequence-to-sequence or span-corruption model generates one greedily.
    """
    config, notes = run.config, list[str]()
    if why := unreadable(run):
        raise ConfigError([Fault("run", why)])
    task = run.task
    continues = isinstance(task, Writer) and task.continues
    first = continues and bool(getattr(task, "begin", ()) or run.tokenizer.bos is not None)
    if not text.strip() and not (first and not text):  # an empty text of a language model begins at <bos>
        raise ConfigError([Fault("text", "is blank: there is nothing to look into")])
    if config.source is not None and config.source.picture is not None:
        return _picture(run, config.source, text.strip())
    check_media(run.task, [text])
    text = _cut("text", text, lambda part: _piece(run, part, None), config, notes)
    piece = _piece(run, text, None)
    begins = len(piece.ids) if isinstance(task, Writer) else None
    if (most := getattr(run.spec, "max_length", None)) == len(piece.ids):
        notes.append(f"text: of long ones only the first {most:,} tokens are read")
    if target is not None:
        target = _cut("target", target, lambda part: _piece(run, text, part), config, notes)
        piece = _piece(run, text, target)
    elif isinstance(task, Writer) and not continues:
        piece = _answered(run.model, task, piece)
    found = _reading(run, piece)
    if piece.spelled is not None:
        found = replace(found, tokens=_spelled(task, text, piece, found.tokens))
    return replace(found, notes=tuple(notes), text=text, begins=begins)


def unreadable(run: Run) -> str:
    """Return why a text cannot be given to a run's model; empty if it can. A model of patches takes a path."""
    if getattr(run.spec, "pictures", None) is not None and run.config.last_input.picture is not None:
        return ""
    inputs = [read for read in run.config.inputs.values() if not isinstance(read, IdInput)]
    return f"its model reads {inputs[0].kind}, not texts: call it in Python" if inputs else ""


def attention_maps(
    of: Run | Transformer, *inputs: str | Tensor, target: str | None = None, **options: Any
) -> dict[str, Tensor]:
    """Return the attention maps of a run for a text, or of a model for ids.

    Args:
        of: a run or a model.
        inputs: the text; for a model ids [b, t], or source and target.
        target: the output that is read with the text; None: a model that answers a source writes it.
        options: `stacks`, `layers` and `heads` that are returned (see `nn/inspection/attention_maps.py`).

    Returns:
        {"encoder" | "decoder" | "cross": [layers, b, heads, t, s]}; rows are queries and sum to 1.

    Raises:
        ValueError: a run is given ids, or a layer or head does not exist.

    Example:
        >>> maps = af.attention_maps(af.load("runs/sort", device="cpu"), "3 1 2")
        >>> list(maps), bool((maps["decoder"].sum(-1) - 1).abs().max() < 1e-4)
        (['decoder'], True)
    """
    if isinstance(of, Transformer):
        return maps.attention_maps(of, *inputs, **options)  # type: ignore[arg-type]
    if len(inputs) != 1 or not isinstance(inputs[0], str):
        raise ValueError("a run reads one text: attention_maps(run, text); for ids give run.model")
    found = read(of, inputs[0], target)
    return maps.attention_maps(of.model.eval(), *found.inputs, **found.options, **options)


def _picture(run: Run, read: Input, name: str) -> Reading:
    """Return an image for a model of patches; the name is its path, or a reference."""
    store, device = media_of(run.task), next(run.model.parameters()).device
    assert store is not None
    images = store.images([name]).to(device)
    (ids,) = store.encode([name], lambda texts: [[] for _ in texts])
    (whole,) = store.segments(ids)
    assert read.picture is not None
    assert read.length is not None
    before = ["<class>"] * (read.length - read.picture.places)
    segment = Segment("image", len(before), read.picture.grid, whole.value)
    return Reading(
        (images,), {}, {"encoder": before + place_labels(segment, store.spec)}, {"encoder": [segment]}, text=name
    )


def _piece(run: Run, text: str, target: str | None) -> Example:
    """Return the example of a text and a target."""
    if target is not None and not isinstance(run.task, Writer):
        raise ConfigError([Fault("target", "is for models that write: this one reads once")])
    return run.task.read(text, run.config, target)


def _spelled(task: Any, text: str, piece: Example, tokens: dict[Side, list[str]]) -> dict[Side, list[str]]:
    """Return the tokens, with the words themselves where the model reads the spelling of an unknown word."""
    ((side, names),) = tokens.items()
    names, unknown = list(names), task.tokenizer.unk
    for at, word in zip(*task.words(text, piece), strict=True):
        if piece.ids[at] == unknown:
            names[at] = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in word)
    return {side: names}


def _cut(name: str, text: str, make: Callable[[str], Example], config: ModelConfig, notes: list[str]) -> str:
    """Return the longest prefix of a text that fits; add a note if it is shorter than the text."""
    why = _too_long(make(text), config)
    if not why:
        return text
    fits, over = references_end(text), len(text)
    try:
        if fits and _too_long(make(text[:fits]), config):
            raise ConfigError([Fault(name, f"{why}: shorten it")])
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (fits, middle) if _too_long(make(text[:middle]), config) else (middle, over)
    except ConfigError:  # the first text of a pair alone is not a pair
        raise ConfigError([Fault(name, f"{why}: shorten it")]) from None
    if not text[:fits].strip():
        raise ConfigError([Fault(name, f"{why}: nothing of it can be read")])
    notes.append(f"{name} {why}: only its first {fits:,} of {len(text):,} characters are read")
    return text[:fits]


def _too_long(piece: Example, config: ModelConfig) -> str:
    last: Side = "decoder" if config.decoder else "encoder"
    both: list[tuple[Side, int]] = [(last, len(piece.ids))]
    if piece.source is not None:
        both.append(("encoder", len(piece.source)))
    for side, length in both:
        if why := length_fault(length, config, side):
            return why
        if length > MOST:
            return f"has {length:,} tokens, and {MOST:,} are looked at"
    return ""


def _answered(model: Transformer, task: Writer, piece: Example) -> Example:
    """Return the example with the model's greedy answer appended."""
    config, pair = model.config, piece.source is not None
    prompt = list(piece.ids if piece.source is None else piece.source)
    limit = config.decoder.limit if config.decoder else None
    room = min(task.default_budget(len(prompt), config), min(limit or MOST, MOST) - len(piece.ids))
    if room < 1:
        return piece
    device = next(model.parameters()).device
    marks = None if piece.marks is None else torch.tensor([list(piece.marks)], device=device)
    ids, media, marks = read_media(task, torch.tensor([prompt], device=device), marks)
    ends = ending_ids(task.tokenizer, config)
    try:
        request = Request(ids, max_new_tokens=room, stop=ends, marks=marks, media=media)
        said = run_sampling(model, request)
    except NonFiniteLogits:
        raise FloatingPointError("the model's logits are not finite: it gives no answer") from None
    new = before_end(said[0, 1 if pair else len(prompt) :].tolist(), ends)
    marked = None if piece.marks is None else [*piece.marks, *[PLAIN] * len(new)]
    return piece._replace(ids=[*piece.ids, *new], marks=marked)


def _reading(run: Run, piece: Example) -> Reading:
    device, task = next(run.model.parameters()).device, run.task
    if not len(piece.ids):
        raise ConfigError([Fault("text", "has no tokens")])

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, device=device).long()[None]

    last: Side = "decoder" if run.config.decoder else "encoder"
    rows: dict[Side, tuple[TextTokenizer, list[int]]] = {last: (task.tokenizer, list(piece.ids))}
    if piece.source is not None:
        if min(piece.ids) < 0:
            raise ConfigError([Fault("target", "has a reference: the decoder of this model reads tokens only")])
        rows = {"encoder": (task.source_tokenizer or task.tokenizer, list(piece.source)), **rows}
    segments = {side: reader.media.segments(ids) for side, (reader, ids) in rows.items() if reader.media is not None}
    tokens = {side: _labels(reader, ids, segments.get(side, [])) for side, (reader, ids) in rows.items()}
    first, *rest = (tensor(ids) for _, ids in rows.values())
    given = {"marks": piece.marks, "types": piece.types, "spelled": piece.spelled}
    options: dict[str, Any] = {name: tensor(values) for name, values in given.items() if values is not None}
    first, media, marks = read_media(task, first, options.get("marks"))
    if media is not None:
        options["source_media" if rest else "media"] = media
    if marks is not None:
        options["marks"] = marks
    return Reading((first, *rest), options, tokens, segments)


def _labels(reader: TextTokenizer, ids: list[int], segments: list[Segment]) -> list[str]:
    labels = token_names(reader, [max(0, id) for id in ids])
    for one in segments:
        assert reader.media is not None
        labels[one.start : one.stop] = place_labels(one, reader.media.spec)
    return labels


def place_labels(segment: Segment, spec: Media) -> list[str]:
    """Return a label for each place of a segment: row and column of a patch, seconds of a sound, `f` of a vector."""
    rows, columns = segment.grid
    match segment.kind:
        case "image":
            return [f"▦ {row},{column}" for row in range(rows) for column in range(columns)]
        case "audio":
            assert spec.audio is not None
            seconds = spec.audio.stride * spec.audio.hop / spec.audio.rate
            return [f"{i * seconds:.2f} s" for i in range(columns)]
        case "features":
            return ["f"] * columns


def token_names(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """Return tokens as `tokenizer.token` shows them; the bytes of a character are `한[1/3]`, `한[2/3]`, `한[3/3]`."""
    names = [tokenizer.token(i) for i in ids]
    for first, name in enumerate(names):
        lead = BYTE.fullmatch(name)
        size = 0 if lead is None else next((n for n, least in LEADS if int(lead[1], 16) >= least), 0)
        parts = [BYTE.fullmatch(part) for part in names[first : first + size]]
        raw = bytes(int(part[1], 16) for part in parts if part is not None)
        with suppress(UnicodeDecodeError):
            if size and len(raw) == size:
                character = raw.decode("utf-8")
                names[first : first + size] = [f"{character}[{n}/{size}]" for n in range(1, size + 1)]
    return names
