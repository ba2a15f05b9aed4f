"""Mixers in place of self-attention: equal to torch's own layers; which tokens read which; what they can learn."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from anyformer.attention.layout import Layout, make_layout
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    ConfigError,
    Convolution,
    FullyConnected,
    Mixer,
    ModelConfig,
    NoFeedForward,
    NoMixer,
    NoNorm,
    PositionMixing,
    Recurrent,
    Rotary,
    Sinusoidal,
    Stack,
    Tokens,
)
from anyformer.generation.generate import generate
from anyformer.nn.context import Context, RecurrentOptions
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.nn.recurrent import RecurrentMixer
from tests.strategies import build, close, seeds, tokens

WIDTH, VOCAB = 6, 11
CPU = torch.device("cpu")
CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def made(spec: Mixer, seed: int = 0) -> nn.Module:
    """The module of a mixer, in float64, with weights of a good size."""
    torch.manual_seed(seed)
    module = spec.build(WIDTH)
    assert module is not None
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


def vectors(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(module: nn.Module, x: Tensor, layout: Layout | None = None, backend: str = "auto") -> Tensor:
    layout = layout or make_layout(x.shape[0], x.shape[1], CPU)
    return module(x, Context(layout, layout, recurrent=RecurrentOptions(backend=backend)))


def decoder(*mixers: Mixer, width: int = WIDTH, **fields) -> ModelConfig:
    """A decoder whose layers are mixers alone, unless `fields` add other parts."""
    layer = {"norm": NoNorm(), "feedforward": NoFeedForward(), **fields}
    blocks = tuple(Block(mixer=mixer, **layer) for mixer in mixers)
    stack = Stack(depth=len(blocks), blocks=blocks)
    return ModelConfig(width=width, target=Tokens(vocab=VOCAB), decoder=stack, head=LM())


# -- equal to torch's own ----------------------------------------------------------------------------------------------


def theirs(ours: RecurrentMixer, cell: str, both_ways: bool) -> nn.RNNBase:
    """Torch's layer with the same weights."""
    other = CELLS[cell](WIDTH, ours.hidden, batch_first=True, bidirectional=both_ways).double()
    for name, parameter in zip(("", "_reverse"), ours.cells, strict=False):
        other.load_state_dict({f"{n}{name}": p for n, p in parameter.state_dict().items()}, strict=False)
    return other


recurrents = st.builds(
    Recurrent, cell=st.sampled_from(sorted(CELLS)), width=st.sampled_from([None, 4]), both_ways=st.booleans()
)


@given(recurrents, st.sampled_from(["auto", "eager"]), seeds, st.integers(1, 6))
def test_recurrence_equals_torch(spec: Recurrent, backend: str, seed: int, length: int):
    ours, x = made(spec, seed), vectors(seed, 2, length, WIDTH)
    close(run(ours, x, backend=backend), ours.out(theirs(ours, spec.cell, spec.both_ways)(x)[0]))


@given(recurrents, seeds, st.sampled_from(["right", "left", "unknown", "eager"]))
def test_ragged_rows_equal_packed_sequences(spec: Recurrent, seed: int, side: str):
    """Whichever side the pads are on, and whether the kernels know it, each row is read as torch reads it packed."""
    ours, x, lengths = made(spec, seed), vectors(seed, 3, 5, WIDTH), torch.tensor([5, 2, 3])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(theirs(ours, spec.cell, spec.both_ways)(packed)[0], batch_first=True)
    segments = torch.where(torch.arange(5) < lengths[:, None], 0, -1)
    if side == "left":
        x, segments, expected = (torch.stack([r.roll(5 - int(n), 0) for r, n in zip(y, lengths, strict=True)])
                                 for y in (x, segments, expected))  # fmt: skip
    layout = Layout.right_padded(segments) if side in ("right", "eager") else make_layout(3, 5, CPU, segments=segments)
    out = run(ours, x, layout, "eager" if side == "eager" else "auto")
    close(out[segments >= 0], ours.out(expected)[segments >= 0])


convolutions = st.builds(
    Convolution, width=st.integers(1, 4), dilation=st.integers(1, 3), causal=st.booleans(), bias=st.booleans()
)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, of even widths
@given(convolutions, seeds, st.integers(1, 8), st.booleans())
def test_convolution_equals_torch(spec: Convolution, seed: int, length: int, told: bool):
    """By the kernel, or, where segments are given, by looking tokens up."""
    ours, x = made(spec, seed), vectors(seed, 2, length, WIDTH)
    other = nn.Conv1d(
        WIDTH, WIDTH, spec.width, dilation=spec.dilation, padding=0 if spec.causal else "same", bias=spec.bias
    ).double()
    other.load_state_dict(ours.conv.state_dict())
    span = spec.dilation * (spec.width - 1) if spec.causal else 0
    expected = other(F.pad(x.transpose(1, 2), (span, 0))).transpose(1, 2)
    layout = make_layout(2, length, CPU, segments=torch.zeros(2, length, dtype=torch.long) if told else None)
    close(run(ours, x, layout), expected)


@given(convolutions, seeds, st.integers(-3, 3))
def test_convolution_is_shift_equivariant(spec: Convolution, seed: int, shift: int):
    """A shifted input gives a shifted output."""
    ours, x = made(spec, seed), F.pad(vectors(seed, 1, 4, WIDTH), (0, 0, 15, 15))
    close(run(ours, x.roll(shift, 1)), run(ours, x).roll(shift, 1))


@given(st.sampled_from([FullyConnected, PositionMixing]), seeds, st.integers(1, 5), st.booleans(), st.booleans())
def test_weights_by_position_are_one_matrix(kind: type, seed: int, length: int, causal: bool, told: bool):
    """A linear layer over the flattened sequence, or over positions; a shorter one has the corner of the matrix."""
    ours, x = made(kind(length=5, causal=causal), seed), vectors(seed, 2, length, WIDTH)
    layout = make_layout(2, length, CPU, segments=torch.zeros(2, length, dtype=torch.long) if told else None)
    each = WIDTH if kind is FullyConnected else 1  # rows for each position
    earlier = torch.ones(5, 5, dtype=torch.float64).tril() if causal else torch.ones(5, 5, dtype=torch.float64)
    weight = ours.weight * earlier.repeat_interleave(each, 0).repeat_interleave(each, 1)
    weight, bias = weight[: length * each, : length * each], ours.bias[: length * each]
    if kind is FullyConnected:
        expected = F.linear(x.flatten(1), weight, bias).view_as(x)
    else:
        expected = F.linear(x.transpose(1, 2), weight, bias).transpose(1, 2)
    close(run(ours, x, layout), expected)


# -- visible tokens ---------------------------------------------------------------------------------------------------

LONG = 7


def reads(module: nn.Module) -> Tensor:
    """Which outputs depend on which inputs, bool [t, s]."""
    x = vectors(1, LONG, WIDTH)
    slopes = torch.autograd.functional.jacobian(lambda x: run(module, x[None])[0], x)  # [t, d, s, d]
    return slopes.abs().sum(dim=(1, 3)) > 0


AWAY = torch.arange(LONG)[None] - torch.arange(LONG)[:, None]  # key - query


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Recurrent(cell="rnn"), AWAY <= 0),
        (Recurrent(cell="lstm"), AWAY <= 0),
        (Recurrent(cell="gru"), AWAY <= 0),
        (Recurrent(cell="gru", both_ways=True), AWAY == AWAY),
        (Convolution(width=3, causal=True), (AWAY <= 0) & (AWAY >= -2)),
        (Convolution(width=3, causal=False), AWAY.abs() <= 1),
        (Convolution(width=3, dilation=2, causal=False), (AWAY.abs() <= 2) & (AWAY % 2 == 0)),
        (Convolution(width=2, dilation=3, causal=True), (AWAY == 0) | (AWAY == -3)),
        (FullyConnected(length=LONG, causal=True), AWAY <= 0),
        (FullyConnected(length=LONG, causal=False), AWAY == AWAY),
        (PositionMixing(length=LONG, causal=True), AWAY <= 0),
        (PositionMixing(length=LONG, causal=False), AWAY == AWAY),
    ],
    ids=str,
)
def test_who_reads_whom(spec: Mixer, expected: Tensor):
    assert torch.equal(reads(made(spec)), expected)


def test_the_side_decides_what_is_causal():
    """A mixer without a given direction is causal in a decoder and bidirectional in an encoder."""
    for spec in (Convolution(width=3), FullyConnected(length=6), PositionMixing(length=6)):
        block = Block(mixer=spec, feedforward=NoFeedForward(), norm=NoNorm())
        stack = Stack(depth=1, blocks=block)
        one = build(ModelConfig(width=WIDTH, source=Tokens(vocab=VOCAB), encoder=stack))
        other = build(ModelConfig(width=WIDTH, target=Tokens(vocab=VOCAB), decoder=stack))
        ids = tokens(0, 1, 6)
        changed = torch.cat((ids[:, :3], (ids[:, 3:] + 1) % VOCAB), dim=1)
        assert torch.equal(other(ids)[:, :3], other(changed)[:, :3])
        assert not torch.equal(one(ids)[:, :3], one(changed)[:, :3])


def test_no_mixer_is_no_sublayer():
    """No weights, no cost, nothing in a cache; every token alone."""
    config = decoder(NoMixer(), NoMixer())
    model, ids = build(config), tokens(0, 2, 5)
    assert [row.part for row in count(config, 5).rows] == ["target embeddings", "head"]
    cache = model.new_cache(2, 5)
    close(model(ids, cache=cache), model(ids))
    assert cache.nbytes() == 0
    close(model(ids), torch.cat([model(ids[:, i : i + 1]) for i in range(5)], dim=1))


# -- a state handed over -----------------------------------------------------------------------------------------------


def pair(give: Mixer, take: Mixer, depth: int = 2, **fields) -> ModelConfig:
    layer = {"norm": NoNorm(), "feedforward": NoFeedForward()}
    return ModelConfig(
        width=WIDTH,
        source=Tokens(vocab=VOCAB),
        target=Tokens(vocab=VOCAB),
        encoder=Stack(depth=depth, blocks=Block(mixer=give, **layer)),
        decoder=Stack(depth=2, blocks=Block(mixer=take, **layer, **fields)),
        head=LM(),
        special={"start": 1, "pad": 0},
    )


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("cell", sorted(CELLS))
def test_a_decoder_begins_where_the_encoder_ended(cell: str, backend: str):
    """Layer by layer, as in the sequence-to-sequence LSTM of 2014, with residuals around."""
    model = build(pair(Recurrent(cell=cell, width=4), Recurrent(cell=cell, width=4, begin="encoder")))
    model.backend = backend
    source, target = tokens(0, 2, 5), tokens(1, 2, 4)
    states, x, y = [], model.source.table(source), model.target.table(target)
    for block in model.encoder.blocks:
        inner = block["mixer"].inner
        out, last = inner.cells[0](x)
        states.append(last)
        x = x + inner.out(out)
    for block, state in zip(model.decoder.blocks, states, strict=True):
        inner = block["mixer"].inner
        y = y + inner.out(inner.cells[0](y, state)[0])
    close(model.decode(target, model.encode(source)), y)


@pytest.mark.parametrize("cell", sorted(CELLS))
def test_decoding_goes_on_from_a_state_that_was_handed_over(cell: str):
    """Token by token with a cache, in ragged rows, without cross-attention: the answers of the whole."""
    model = build(pair(Recurrent(cell=cell, both_ways=True), Recurrent(cell=cell, begin="encoder")))
    source, segments = tokens(0, 3, 5), torch.tensor([[0] * 5, [0, 0, -1, -1, -1], [-1, 0, 0, 0, -1]])
    answers = generate(model, source, segments=segments, max_new_tokens=6)
    ids = answers[:, :1]
    for _ in range(6):
        logits = model(source, ids, source_segments=segments)
        ids = torch.cat((ids, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(answers, ids)
    assert not torch.equal(logits, model(source.flip(1), ids[:, :-1], source_segments=segments))  # the source matters


# -- errors ------------------------------------------------------------------------------------------------------------

GRU = Recurrent(cell="gru")
BEGUN = Recurrent(cell="gru", begin="encoder")
FAULTS = {
    "decoder.blocks.0.mixer.both_ways = True: a decoder reads in one direction": lambda: decoder(
        Recurrent(both_ways=True)
    ),
    "decoder.blocks.0.mixer.begin = 'encoder': there is no encoder": lambda: decoder(BEGUN),
    "encoder.blocks.0.mixer.begin = 'encoder': there is no encoder": lambda: pair(BEGUN, BEGUN),
    "decoder.blocks.0.mixer.causal = False: a decoder never reads": lambda: decoder(Convolution(causal=False)),
    "decoder.blocks: no block reads the encoder": lambda: pair(GRU, GRU),
    "must be recurrent, too, with cell 'gru' and width 6": lambda: pair(Recurrent(cell="lstm"), BEGUN),
    "decoder.blocks.0.mixer.begin = 'encoder': layer 1 of the encoder": lambda: pair(GRU, BEGUN, depth=1),
    "layer 0 of the encoder must be recurrent, too, with cell 'gru' and width 3": lambda: pair(
        GRU, Recurrent(cell="gru", width=3, begin="encoder")
    ),
    "decoder.position: of kind 'rotary': no layer takes it": lambda: positioned(Rotary(), GRU),
    "decoder.position: of kind 'alibi': no layer takes it": lambda: positioned(
        Alibi(), Attention(heads=1, position=Rotary()), NoMixer()
    ),
}


def positioned(position, *mixers: Mixer) -> ModelConfig:
    config = decoder(*mixers)
    assert config.decoder is not None
    return config.model_copy(update={"decoder": config.decoder.model_copy(update={"position": position})})


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str):
    with pytest.raises(ConfigError) as error:
        FAULTS[fault]()
    assert fault in str(error.value)
    assert len(error.value.faults) == 1


def test_schemes_at_the_embedding_and_those_that_are_taken_stand():
    positioned(Sinusoidal(), GRU)
    positioned(Rotary(), GRU, Attention(heads=1))


@pytest.mark.parametrize("spec", [FullyConnected(length=4), PositionMixing(length=4)], ids=lambda spec: spec.kind)
def test_there_are_weights_for_so_many_positions(spec: Mixer):
    """Longer inputs are refused, in decoding too; packed rows count by segment."""
    model = build(decoder(spec))
    message = f"position 4 is past the end of 4 positions of the '{spec.kind}' mixer"
    with pytest.raises(ValueError, match=message):
        model(tokens(0, 1, 5))
    cache = model.new_cache(1, 8)
    model(tokens(0, 1, 4), cache=cache)
    with pytest.raises(ValueError, match=message):
        model(tokens(0, 1, 1), cache=cache)
    model(tokens(0, 1, 8), segments=torch.tensor([[0] * 4 + [1] * 4]))
    assert count(model.config, 5).too_long == ("decoder",)
    assert count(model.config).length == 4


# -- what they learn ---------------------------------------------------------------------------------------------------


def trained(config: ModelConfig, inputs: Tensor, targets: Tensor, steps: int, rate: float = 0.01) -> float:
    """The last loss, in nats a token, of a model trained on the same batch again and again."""
    torch.manual_seed(0)
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


LEARNERS = (
    Recurrent(cell="rnn"),
    Recurrent(cell="lstm"),
    Recurrent(cell="gru"),
    Convolution(width=3),
    FullyConnected(length=8),
    PositionMixing(length=8),
)


@pytest.mark.parametrize("spec", LEARNERS, ids=str)
def test_every_mixer_learns_to_say_what_came_before(spec: Mixer):
    """An echo of the token two places back; a model that reads no other token can only guess."""
    ids = tokens(0, 64, 8)
    targets = F.pad(ids[:, :-2], (2, 0))
    assert trained(decoder(spec, width=32).model_copy(update={"init": "fan_in"}), ids, targets, steps=150) < 0.1


def test_without_a_mixer_a_model_is_a_bigram_model():
    """Its loss comes down to the entropy of the next token given this one, and never below."""
    text = "the quick brown fox jumps over the lazy dog and then the other dogs jump over the lazy fox"
    letters = sorted(set(text))
    ids = torch.tensor([[letters.index(c) for c in text]])
    inputs, targets = ids[:, :-1], ids[:, 1:]
    pairs, firsts = Counter(pairwise(text)), Counter(text[:-1])
    entropy = -sum(n * math.log(n / firsts[a]) for (a, _), n in pairs.items()) / (len(text) - 1)
    layers = Stack(depth=2, blocks=Block(mixer=NoMixer()), position="none", final_norm="layer")
    config = ModelConfig(width=32, target=Tokens(vocab=len(letters)), decoder=layers, head=LM(), init="fan_in")
    bigram = trained(config, inputs, targets, steps=200)
    assert entropy - 1e-6 <= bigram < entropy + 0.01
    knows = config.model_copy(update={"decoder": layers.model_copy(update={"blocks": Block(mixer=Convolution())})})
    assert trained(knows, inputs, targets, steps=60) < entropy - 0.1  # what reads more does better
