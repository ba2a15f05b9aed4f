"""Streams of tokens, images, sounds and feature vectors: where they stand, how rows are batched, and what sees what."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.attention.layout import make_layout, sees
from anyformer.config import (
    LM,
    Attention,
    AudioSegment,
    AxialRotary,
    Block,
    Causal,
    Classifier,
    ConvStem,
    FeatureSegment,
    ImageSegment,
    Learned,
    LearnedGrid,
    LoRA,
    Media,
    ModelConfig,
    NoGrid,
    NoStem,
    Patches,
    Position,
    Rotary,
    SinusoidalGrid,
    Special,
    Stack,
    Tokens,
)
from anyformer.data.batch import Example, collate
from anyformer.data.media import MediaStore
from anyformer.generation.score import score, top_tokens
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.tasks.base import inputs_of
from anyformer.training.parallel import Ranks
from tests.strategies import build, close

VOCAB, WIDTH = 11, 24
IMAGES = st.builds(
    ImageSegment,
    image_height=st.just(8),
    image_width=st.sampled_from([None, 4]),
    patch=st.sampled_from([2, 4]),
    channels=st.sampled_from([1, 3]),
    stem=st.sampled_from([NoStem(), ConvStem(channels=4)]),
    position=st.sampled_from([NoGrid(), LearnedGrid(), SinusoidalGrid()]),
    both_ways=st.booleans(),
)
SOUNDS = st.builds(AudioSegment, mels=st.just(3), strided=st.sampled_from([1, 2]), both_ways=st.booleans())
FEATURES = st.sampled_from([FeatureSegment(size=2), FeatureSegment(size=2, places=2), FeatureSegment(size=2, values=9)])
MEDIA = st.builds(Media, image=IMAGES, audio=SOUNDS, features=FEATURES, types=st.booleans())
POSITIONS = st.sampled_from([Rotary(), AxialRotary(), Learned(length=200)])


def model_of(media: Media, shape: str, position: Position = Rotary()) -> ModelConfig:  # noqa: B008
    stack = Stack(depth=2, blocks=(Block(mixer=Attention(heads=2)),), position=position)
    tokens = Tokens(vocab=VOCAB, media=media)
    special = Special(pad=0, start=1)
    match shape:
        case "encoder":
            return ModelConfig(width=WIDTH, source=tokens, encoder=stack, head=Classifier(labels=3, pool="mean"))
        case "decoder":
            return ModelConfig(width=WIDTH, target=tokens, decoder=stack, head=LM(), special=special)
        case _:
            crossed = stack.model_copy(update={"blocks": (Block(mixer=Attention(heads=2), cross=Attention(heads=2)),)})
            return ModelConfig(
                width=WIDTH, source=tokens, encoder=stack, target=Tokens(vocab=VOCAB), decoder=crossed, head=LM(),
                special=special,
            )  # fmt: skip


class Store(MediaStore):
    """A store whose segments are drawn from their name, rather than read from a file."""

    def _read(self, kind: str, name: str) -> np.ndarray:
        rng = np.random.default_rng(int(name))
        match kind:
            case "image":
                assert self.spec.image is not None
                return rng.integers(0, 256, (self.spec.image.channels, *self.spec.image.size), dtype=np.uint8)
            case "audio":
                assert self.spec.audio is not None
                return rng.normal(size=(3 + int(name) % 6, self.spec.audio.mels)).astype(np.float32)
            case _:
                assert self.spec.features is not None
                values = self.spec.features.values
                return (rng.integers(0, values, 2) if values else rng.normal(size=2)).astype(np.float32)


PARTS = st.one_of(
    st.integers(1, VOCAB - 1).map(str),
    st.tuples(st.sampled_from(["image", "audio", "features"]), st.integers(0, 9)).map(lambda p: f"<{p[0]}:{p[1]}>"),
)
TEXTS = st.lists(PARTS, min_size=1, max_size=5).map(" ".join)


def encoded(store: MediaStore, texts: list[str]) -> list[list[int]]:
    return store.encode(texts, lambda rows: [[int(word) for word in row.split()] for row in rows])


def store_of(config: ModelConfig) -> Store:
    store = Store.of(config)
    assert isinstance(store, Store)
    return store


def read(model: Transformer, store: MediaStore, rows: list[list[int]], packed: bool = False) -> torch.Tensor:
    """Return the hidden states of rows in one batch, or packed into one row."""
    examples = [Example(ids, ids) for ids in rows]
    plan = [tuple(range(len(rows)))] if packed else [(i,) for i in range(len(rows))]
    batch = store.attach(collate(plan, examples, 0, 0))
    (inputs,) = inputs_of(batch, packed)
    return model.decode(inputs) if model.encoder is None else model.encode(inputs)


@given(MEDIA, st.sampled_from(["encoder", "decoder"]), POSITIONS, st.lists(TEXTS, min_size=2, max_size=3))
def test_padding_and_packing_change_nothing(media: Media, shape: str, position: Position, texts: list[str]):
    """A row alone equals the row in a batch, and the row packed with others."""
    config = model_of(media, shape, position)
    model, store = build(config), store_of(config)
    rows = encoded(store, texts)
    together, packed, at = read(model, store, rows), read(model, store, rows, packed=True), 0
    for i, ids in enumerate(rows):
        alone = read(model, store, [ids])[0]
        close(together[i, : len(ids)], alone, 1e-6)
        close(packed[0, at : at + len(ids)], alone, 1e-6)
        at += len(ids)


@given(MEDIA, POSITIONS, TEXTS, st.integers(1, 4))
def test_cached_equals_uncached(media: Media, position: Position, text: str, more: int):
    """With segments in the prompt, and tokens after it."""
    config = model_of(media, "decoder", position)
    model, store = build(config), store_of(config)
    (prompt,) = encoded(store, [text])
    new = [1 + i % (VOCAB - 1) for i in range(more)]
    whole = read(model, store, [[*prompt, *new]])
    ids, segments, marks = store.read(torch.tensor([prompt]))
    cache = model.new_cache(1, len(prompt) + more, kind="static")
    close(model.decode(ids, media=segments, marks=marks, cache=cache), whole[:, : len(prompt)], 1e-6)
    for i, id in enumerate(new):
        close(model.decode(torch.tensor([[id]]), cache=cache), whole[:, len(prompt) + i : len(prompt) + i + 1], 1e-6)


@pytest.mark.parametrize("position", [Learned(length=20), Rotary()], ids=lambda p: p.kind)
def test_an_image_alone_is_a_vit(position: Position):
    """A class token and an image in a stream: what `patches` give, by the same weights."""
    image = ImageSegment(image_height=8, patch=4, channels=3)
    stream = build(model_of(Media(image=image, types=False), "encoder", position))
    spec = Patches(image_height=8, patch=4, channels=3)
    vit = Transformer(stream.config.model_copy(update={"source": spec})).double().eval()
    weights = stream.state_dict()
    renamed = {
        "source.project.weight": weights["source.media.image.project.weight"],
        "source.project.bias": weights["source.media.image.project.bias"],
        "source.class_token.weight": weights["source.table.weight"][1:2],
    }
    kept = {name: x for name, x in weights.items() if not name.startswith("source.")}
    vit.load_state_dict(kept | renamed)
    store = store_of(stream.config)
    (row,) = encoded(store, ["1 <image:4>"])
    ids, media, _ = store.read(torch.tensor([row]))
    assert media is not None
    assert media.images is not None
    close(stream(ids, media=media), vit(media.images.double()), 1e-6)


@given(st.lists(st.integers(-2, 0), min_size=1, max_size=12), st.lists(st.integers(-1, 1), min_size=12, max_size=12))
def test_groups_see_each_other(groups: list[int], documents: list[int]):
    """The same negative mark and the same segment: both directions; everything else is causal."""
    segments = torch.tensor([documents[: len(groups)]])
    layout = make_layout(1, len(groups), torch.device("cpu"), segments=segments, marks=torch.tensor([groups]))
    seen = sees(Causal(), layout, layout)[0]
    positions = layout.positions[0].tolist()
    for i, j in np.ndindex(len(groups), len(groups)):
        same = documents[i] == documents[j]
        grouped = groups[i] == groups[j] < 0
        assert bool(seen[i, j]) == (same and (positions[j] <= positions[i] or grouped))


def test_text_before_an_image_does_not_see_it():
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    model, store = build(config), store_of(config)
    a, b = (read(model, store, encoded(store, [f"1 2 <image:{i}> 3"])) for i in (1, 2))
    assert torch.equal(a[:, :2], b[:, :2])
    assert not torch.equal(a[:, 2], b[:, 2])
    last_changed = read(model, store, encoded(store, ["1 2 <image:1> 4"]))
    assert torch.equal(a[:, :-1], last_changed[:, :-1])


@given(st.integers(0, 5))
def test_axial_rotary_reads_a_text_as_rotary(seed: int):
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    media = Media(image=ImageSegment(image_height=8, patch=4))
    a, b = (build(model_of(media, "decoder", position), seed) for position in (Rotary(), AxialRotary()))
    close(a(ids), b(ids))


def test_axial_rotary_knows_rows_and_columns():
    """A patch turns by the row and the column it is in, so that swapping two patches in the grid changes the rest."""
    media = Media(image=ImageSegment(image_height=8, patch=4, channels=1), types=False)
    model = build(model_of(media, "encoder", AxialRotary()))
    assert model.source is not None
    image_at = torch.arange(4)[None]
    coordinates = model.source.media.coordinates(type("M", (), {"image_at": image_at}), torch.arange(4)[None])
    assert coordinates[0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("position", [Rotary(), AxialRotary(), Learned(length=20)], ids=lambda position: position.kind)
def test_coordinates_are_computed_only_where_they_are_read(shape: str, position: Position):
    media = Media(image=ImageSegment(image_height=8, patch=4))
    model = build(model_of(media, shape, position))
    store = store_of(model.config)
    ids, segments, _ = store.read(torch.tensor(encoded(store, ["1 <image:2>"])))
    target, keyword = (ids[:, :1], "source_media") if shape == "encoder-decoder" else (None, "media")
    layouts = {side: layout for side, (_, layout) in model.read_sides(ids, target, **{keyword: segments}).items()}
    read = [side for side, layout in layouts.items() if layout.coordinates is not None]
    first = next(iter(layouts))  # the target of the encoder-decoder has no image
    assert read == ([first] if isinstance(position, AxialRotary) else [])


@settings(max_examples=20)
@given(MEDIA, st.sampled_from(["encoder", "decoder", "encoder-decoder"]))
def test_count_is_the_number_of_parameters(media: Media, shape: str):
    config = model_of(media, shape)
    assert count(config, length=32).parameters == Transformer(config).num_parameters()


def test_a_source_of_an_encoder_decoder():
    config = model_of(Media(audio=AudioSegment(mels=3)), "encoder-decoder")
    model, store = build(config), store_of(config)
    rows = encoded(store, ["<audio:1>", "<audio:3> 4"])
    examples = [Example([1, 2], [2, 3], row) for row in rows]
    batch = store.attach(collate([(0,), (1,)], examples, 0, 0))
    together = model(*inputs_of(batch, packed=False))
    for i in range(2):
        one = store.attach(collate([(0,)], [examples[i]], 0, 0))
        close(together[i], model(*inputs_of(one, packed=False))[0], 1e-6)


def test_scores_are_those_of_the_whole_stream():
    """Log-probabilities of the tokens after an image, in a batch of unequal rows, and the most probable next one."""
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    model, store = build(config), store_of(config)
    rows = encoded(store, ["<image:1> 3 4 5", "2 <image:2> 3"])
    found = score(model, rows, read=store.read)
    for row, each in zip(rows, found, strict=True):
        logits = model.apply_head(read(model, store, [row]), make_layout(1, len(row), torch.device("cpu")))[0]
        expected = logits.log_softmax(-1)
        for i, id in enumerate(row[1:]):
            if id >= 0:
                close(each[i], expected[i, id], 1e-6)
    top = top_tokens(model, rows[1:], 1, read=store.read)
    assert int(top.ids[0, 0]) == int(logits[-1].argmax())


def test_processes_share_a_batch():
    """Each of two processes reads its own rows, with the segments that are in them."""
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    model, store = build(config), store_of(config)
    rows = encoded(store, ["<image:1> 3", "2 <image:2>", "4 5"])
    batch = store.attach(collate([(i,) for i in range(3)], [Example(row, row) for row in rows], 0, 0))
    whole = model.decode(*inputs_of(batch, packed=False))
    for rank in range(2):
        own = Ranks(rank, 2).split(batch)
        close(model.decode(*inputs_of(own, packed=False)), whole[rank::2], 1e-6)


def test_adapters_and_gradients():
    """LoRA trains on a stream; without it every weight of the segments has a gradient."""
    media = Media(image=ImageSegment(image_height=8, patch=4), features=FeatureSegment(size=2))
    config = model_of(media, "decoder")
    store = store_of(config)
    ids, segments, marks = store.read(torch.tensor(encoded(store, ["1 <image:1> <features:2> 5"])))
    model = Transformer(config)
    model(ids, media=segments, marks=marks).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if ".media." in n)
    adapted = Transformer(config.model_copy(update={"adapter": LoRA(rank=2)}))
    assert adapted(ids, media=segments, marks=marks).isfinite().all()


def test_the_same_image_twice_in_succession():
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    store = store_of(config)
    (row,) = encoded(store, ["<image:1> <image:1>"])
    _, media, marks = store.read(torch.tensor([row]))
    assert media is not None
    assert media.images is not None
    assert len(media.images) == 2
    assert marks is not None
    assert marks.tolist() == [[-1] * 4 + [-2] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(1, 3, 8, 6)}, "images must be floating-point"),
        ({"features": torch.zeros(1, 2)}, "this model reads no features"),
        ({"image_at": torch.zeros(1, 3, dtype=torch.long)}, "image_at has shape"),
    ],
)
def test_wrong_segments_are_refused(change: dict[str, torch.Tensor], message: str):
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    model, store = build(config), store_of(config)
    ids, media, _ = store.read(torch.tensor(encoded(store, ["1 <image:1>"])))
    assert media is not None
    with pytest.raises(ValueError, match=message):
        model(Inputs(ids, media=media._replace(**change)))


def test_a_model_of_tokens_refuses_segments():
    config = model_of(Media(image=ImageSegment(image_height=8, patch=4)), "decoder")
    store = store_of(config)
    ids, media, _ = store.read(torch.tensor(encoded(store, ["1 <image:1>"])))
    plain = build(config.model_copy(update={"target": Tokens(vocab=VOCAB)}))
    with pytest.raises(ValueError, match="tokens only"):
        plain(ids, media=media)
