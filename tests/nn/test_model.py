"""The model as a whole: what it takes, and that a wrong call is one clear line."""

import re

import pytest
import torch

from anyformer.attention.layout import Layout, make_layout
from anyformer.config import LM, Attention, Block, ModelConfig, Stack, Tokens
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, tokens

BLOCK = Block(mixer=Attention(heads=2))
READ = Tokens(vocab=11)
STACK = Stack(depth=2, blocks=(BLOCK,))
CROSSING = Stack(depth=2, blocks=(BLOCK.model_copy(update={"cross": Attention(heads=2)}),))
CONFIGS = {
    "decoder": ModelConfig(width=8, target=READ, decoder=STACK, head=LM()),
    "encoder": ModelConfig(width=8, source=READ, encoder=STACK, head=LM()),
    "pair": ModelConfig(width=8, source=READ, target=READ, encoder=STACK, decoder=CROSSING, head=LM()),
    "typed": ModelConfig(width=8, source=Tokens(vocab=11, types=2), encoder=STACK, head=LM()),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {name: build(config) for name, config in CONFIGS.items()}


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
ZEROS = torch.zeros(2, 3, dtype=torch.long)

WRONG = {
    "a target for a decoder": ("decoder", lambda m: m(IDS, IDS), "target: not for a decoder-only model"),
    "a target for an encoder": ("encoder", lambda m: m(IDS, IDS), "target: not for an encoder-only model"),
    "no target": ("pair", lambda m: m(IDS), "call it with (source, target)"),
    "sided segments for a decoder": (
        "decoder",
        lambda m: m(IDS, target_segments=ZEROS, source_positions=ZEROS),
        "target_segments, source_positions: not for a decoder-only model, which takes segments",
    ),
    "plain segments for a pair": (
        "pair",
        lambda m: m(IDS, IDS, segments=ZEROS),
        "segments: not for an encoder-decoder",
    ),
    "marks for a pair": ("pair", lambda m: m(IDS, IDS, marks=ZEROS), "marks: not for an encoder-decoder"),
    "an id past the end": ("decoder", lambda m: m(IDS + 6), "id 12 is outside the vocabulary of 11"),
    "a negative id": ("encoder", lambda m: m(IDS - 2), "id -1 is outside the vocabulary of 11"),
    "a target id past the end": ("pair", lambda m: m(IDS, IDS + 6), "id 12 is outside the vocabulary of 11"),
    "float ids": ("decoder", lambda m: m(IDS.float()), "ids must be integers [batch, length], got torch.float32"),
    "bool ids": ("decoder", lambda m: m(IDS > 1), "ids must be integers [batch, length], got torch.bool"),
    "bytes": (
        "decoder",
        lambda m: m(IDS.to(torch.uint8)),
        "ids must be integers [batch, length], got torch.uint8",
    ),
    "a vector of ids": (
        "decoder",
        lambda m: m(IDS[0]),
        "ids must be integers [batch, length], got torch.int64 [3]",
    ),
    "no tokens": (
        "decoder",
        lambda m: m(IDS[:, :0]),
        "ids are empty, [2, 0]: pass at least one row of at least one token",
    ),
    "no rows": ("decoder", lambda m: m(IDS[:0]), "ids are empty, [0, 3]: pass at least one row"),
    "an empty target": ("pair", lambda m: m(IDS, IDS[:, :0]), "ids are empty, [2, 0]"),
    "segments too short": (
        "decoder",
        lambda m: m(IDS, segments=ZEROS[:, :2]),
        "segments has shape [2, 2], expected [2, 3] like the tokens",
    ),
    "segments of one row": (
        "decoder",
        lambda m: m(IDS, segments=ZEROS[0]),
        "segments has shape [3], expected [2, 3] like the tokens",
    ),
    "source segments too long": (
        "pair",
        lambda m: m(IDS[:, :2], IDS, source_segments=ZEROS),
        "segments has shape [2, 3], expected [2, 2] like the tokens",
    ),
    "positions of another batch": (
        "encoder",
        lambda m: m(IDS, positions=torch.zeros(3, 3, dtype=torch.long)),
        "positions has shape [3, 3], expected [2, 3] like the tokens",
    ),
    "marks too short": (
        "encoder",
        lambda m: m(IDS, marks=ZEROS[:, :2]),
        "marks has shape [2, 2], expected [2, 3] like the tokens",
    ),
    "float segments": ("encoder", lambda m: m(IDS, segments=ZEROS.float()), "segments must be integers"),
    "a layout and positions": (
        "decoder",
        lambda m: m(Inputs(IDS, Layout(ZEROS)), positions=ZEROS),
        "positions: `Inputs` hold these themselves",
    ),
    "types for a model without": ("encoder", lambda m: m(IDS, types=ZEROS), "this model has no token types"),
    "types for a pair": ("pair", lambda m: m(IDS, IDS, types=ZEROS), "types: not for an encoder-decoder"),
    "source types for a decoder": (
        "decoder",
        lambda m: m(IDS, source_types=ZEROS),
        "source_types: not for a decoder-only model",
    ),
    "types for a decoder without": ("decoder", lambda m: m(IDS, types=ZEROS), "this model has no token types"),
    "a type past the end": ("typed", lambda m: m(IDS, types=ZEROS + 2), "type 2 is outside the 2 token types"),
    "types of the wrong shape": (
        "typed",
        lambda m: m(IDS, types=ZEROS[:, :2]),
        "types has shape [2, 2], expected [2, 3]",
    ),
    "a cache for an encoder": (
        "encoder",
        lambda m: m(IDS, cache=build(CONFIGS["decoder"]).new_cache(2, 4)),
        "an encoder reads its whole input at once: leave `cache` and `past` out",
    ),
    "a new cache of an encoder": ("encoder", lambda m: m.new_cache(2, 4), "only a decoder has a cache"),
    "marks after cached tokens": (
        "decoder",
        lambda m: [m(IDS, marks=ZEROS + 1, cache=cache) for cache in [m.new_cache(2, 6)] * 2],
        "only the first tokens that a cache reads may be marked",
    ),
    "a marked layout after cached tokens": (
        "decoder",
        lambda m: [m(Inputs(IDS, Layout(ZEROS, marks=ZEROS + 1)), cache=cache) for cache in [m.new_cache(2, 6)] * 2],
        "only the first tokens that a cache reads may be marked",
    ),
    "a seer with a cache": (
        "decoder",
        lambda m: m(IDS, marks=ZEROS + 2, cache=m.new_cache(2, 4)),
        "a token that sees its whole segment sees tokens that are not read yet",
    ),
    "decoding without the encoder's output": (
        "pair",
        lambda m: m.decode(IDS),
        "the decoder needs the encoder's output",
    ),
    "decoding from an empty cache": (
        "pair",
        lambda m: m.decode(IDS, cache=m.new_cache(2, 4)),
        "the decoder needs the encoder's output",
    ),
    "an encoder's output for a decoder": (
        "decoder",
        lambda m: m.decode(IDS, torch.zeros(2, 3, 8, dtype=torch.float64)),
        "this model has no encoder: leave `encoder_out` out",
    ),
    "an encoder's output of another batch": (
        "pair",
        lambda m: m.decode(IDS, torch.zeros(3, 5, 8, dtype=torch.float64)),
        "encoder_out has shape [3, 5, 8], expected [2, s, 8]",
    ),
    "an encoder's output of another width": (
        "pair",
        lambda m: m.decode(IDS, torch.zeros(2, 5, 4, dtype=torch.float64)),
        "encoder_out has shape [2, 5, 4], expected [2, s, 8]",
    ),
    "a source without the encoder's output": (
        "pair",
        lambda m: m.decode(IDS, source=ZEROS),
        "pass both, or neither",
    ),
    "a source for a decoder": ("decoder", lambda m: m.decode(IDS, source=ZEROS), "pass both, or neither"),
    "encoding without an encoder": ("decoder", lambda m: m.encode(IDS), "this model has no encoder"),
    "decoding without a decoder": ("encoder", lambda m: m.decode(IDS), "this model has no decoder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(models: dict[str, Transformer], case: str):
    name, call, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(models[name])
    assert "\n" not in str(error.value)


def test_an_unknown_keyword_names_the_closest(models: dict[str, Transformer]):
    for call in (models["decoder"], models["decoder"].decode, models["encoder"].encode):
        with pytest.raises(TypeError, match="unexpected keyword argument 'segment': did you mean 'segments'"):
            call(IDS, segment=ZEROS)
    with pytest.raises(TypeError, match="pass a Layout as `Inputs"):
        models["decoder"](IDS, segments=Layout(ZEROS))


def test_inputs_are_the_keywords_of_a_side(models: dict[str, Transformer]):
    segments = torch.tensor([[0, 0, -1], [0, 1, 1]])
    layout = make_layout(2, 3, IDS.device, segments=segments)
    for name in ("encoder", "decoder"):
        assert torch.equal(models[name](Inputs(IDS, layout)), models[name](IDS, segments=segments))
    both = models["pair"](IDS, IDS, source_segments=segments, target_segments=segments)
    assert torch.equal(models["pair"](Inputs(IDS, layout), Inputs(IDS, layout)), both)
    typed = models["typed"](IDS, segments=segments, types=ZEROS + 1)
    assert torch.equal(models["typed"](Inputs(IDS, layout, ZEROS + 1)), typed)


def test_an_unknown_backend():
    model = build(CONFIGS["decoder"])
    model.backend = "flash"
    with pytest.raises(ValueError, match="backend = 'flash'"):
        model(IDS)


# -- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_int32_ids_are_ids(models: dict[str, Transformer], name: str):
    model, short = models[name], IDS.to(torch.int32)
    args = (lambda ids: (ids, ids)) if name == "pair" else (lambda ids: (ids,))
    assert torch.equal(model(*args(short)), model(*args(IDS)))


def test_defaults_are_one_segment_counted_from_zero(models: dict[str, Transformer]):
    positions = torch.arange(3)[None]
    for name in ("decoder", "encoder"):
        close(models[name](IDS, segments=ZEROS, positions=positions), models[name](IDS))
    sided = {
        f"{side}_{what}": x
        for side in ("source", "target")
        for what, x in (("segments", ZEROS), ("positions", positions))
    }
    close(models["pair"](IDS, IDS, **sided), models["pair"](IDS, IDS))


def test_forward_is_its_steps(models: dict[str, Transformer]):
    """encode, decode and the head, each callable by itself."""
    layout = Layout(torch.arange(3)[None])
    model = models["pair"]
    hidden = model.decode(IDS, model.encode(IDS))
    assert torch.equal(model.apply_head(hidden, layout), model(IDS, IDS))
    model = models["decoder"]
    assert torch.equal(model.apply_head(model.decode(IDS), layout), model(IDS))
    model = models["encoder"]
    assert torch.equal(model.apply_head(model.encode(IDS), layout), model(IDS))


def test_the_source_is_padded_by_its_own_segments(models: dict[str, Transformer]):
    model, source, target = models["pair"], tokens(0, 2, 5), tokens(1, 2, 3)
    segments = torch.tensor([[0, 0, 0, -1, -1]] * 2)
    close(model(source, target, source_segments=segments), model(source[:, :3], target))
    encoder_out = model.encode(source, segments=segments)
    layout = Layout(torch.arange(3)[None])
    close(model.apply_head(model.decode(target, encoder_out, source=segments), layout), model(source[:, :3], target))


def test_num_parameters_counts_what_is_stored(models: dict[str, Transformer]):
    for model in models.values():
        assert model.num_parameters() == sum(x.numel() for x in model.state_dict().values())


def stacked(**fields) -> Transformer:
    return build(ModelConfig(width=8, source=READ, encoder=Stack(**fields), head=LM()))


def test_a_stack_is_a_prefix_and_a_tiled_pattern():
    """The block of each layer, identified by its number of heads."""
    one, two, four = (Block(mixer=Attention(heads=heads)) for heads in (1, 2, 4))
    model = stacked(depth=6, prefix=(one,), blocks=(two, four))
    _, seen = run_with_taps(model, ["*.weights"], IDS)
    assert [x.shape[1] for x in seen.values()] == [1, 2, 4, 2, 4, 2]
    assert list(seen) == [f"encoder.{i}.mixer.weights" for i in range(6)]
    assert len(model.encoder.blocks) == 6


def test_shared_weights_run_again():
    """With `share` the tile's blocks are reused (the prefix is not), and gradients of all runs add up."""
    one, two, four = (Block(mixer=Attention(heads=heads)) for heads in (1, 2, 4))
    shared = stacked(depth=6, prefix=(one,), blocks=(two, four), share=True)
    assert len(shared.encoder.blocks) == 3
    spread = stacked(depth=6, prefix=(one,), blocks=(two, four))
    state = shared.state_dict()
    home = {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 1}

    def source(name: str) -> str:
        parts = name.split(".")
        return ".".join([*parts[:2], str(home[int(parts[2])]), *parts[3:]]) if "blocks" in parts else name

    spread.load_state_dict({name: state[source(name)] for name in spread.state_dict()})
    close(shared(IDS), spread(IDS))
    for model in (shared, spread):
        model(IDS).logsumexp(-1).sum().backward()
    totals: dict[str, torch.Tensor] = {}
    for name, parameter in spread.named_parameters():
        totals[source(name)] = totals.get(source(name), 0) + parameter.grad
    for name, parameter in shared.named_parameters():
        close(parameter.grad, totals[name])
