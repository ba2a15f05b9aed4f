"""Decoding: the cached loop by an uncached one, and where rows end."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    Learned,
    MaskedLM,
    ModelConfig,
    Rotary,
    Special,
    Stack,
    Tokens,
    Window,
)
from anyformer.generation.generate import NonFiniteLogits, generate
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, models, seeds, tokens

BLOCK = Block(mixer=Attention(heads=2), dropout=0.2)
READ = Tokens(vocab=VOCAB)
STACK = Stack(depth=2, blocks=(BLOCK,), position=Rotary())
CROSSING = STACK.model_copy(update={"blocks": (BLOCK.model_copy(update={"cross": Attention(heads=2)}),)})


def decoder(**fields) -> Transformer:
    return build(ModelConfig(**{"width": 8, "target": READ, "decoder": STACK, "head": LM(), **fields}))


def pair(**fields) -> Transformer:
    parts = {"width": 8, "source": READ, "target": READ, "encoder": STACK, "decoder": CROSSING, "head": LM()}
    return build(ModelConfig(**{**parts, "special": Special(start=1), **fields}))


def loop(model: Transformer, row: Tensor, steps: int) -> list[int]:
    """One unpadded row continued by the likeliest token, the whole of it read anew each time."""
    target = torch.tensor([[model.config.special.start]]) if model.encoder else row[None]
    prompt = target.shape[1]
    with torch.no_grad():
        for _ in range(steps):
            logits = model(row[None], target) if model.encoder else model(target)
            target = torch.cat((target, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    return target[0, prompt:].tolist()


@given(models(shapes=("decoder", "encoder-decoder")), seeds, st.integers(1, 4), st.integers(0, 5))
def test_greedy_equals_an_uncached_loop(config: ModelConfig, seed: int, length: int, steps: int):
    model, ids = build(config, seed), tokens(seed, 2, length)
    out = generate(model, ids, max_new_tokens=steps)
    prompt = torch.full((2, 1), 1) if model.encoder else ids
    assert torch.equal(out[:, : prompt.shape[1]], prompt)
    assert out[:, prompt.shape[1] :].tolist() == [loop(model, row, steps) for row in ids]


@pytest.mark.parametrize("side", ["left", "right"])
@given(
    config=models(shapes=("decoder", "encoder-decoder")),
    seed=seeds,
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=3),
)
def test_rows_of_unequal_length(side: str, config: ModelConfig, seed: int, lengths: list[int]):
    """Padded on either side with anything: each row goes on as if it were alone."""
    model, longest = build(config, seed), max(lengths)
    rows = [tokens(seed + i, length) for i, length in enumerate(lengths)]
    ids, segments = tokens(seed + 99, len(rows), longest), torch.full((len(rows), longest), -1)
    for i, row in enumerate(rows):
        real = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, real], segments[i, real] = row, 0
    out = generate(model, ids, segments=segments, max_new_tokens=3)
    assert out[:, -3:].tolist() == [loop(model, row, 3) for row in rows]
    if not model.encoder:
        assert torch.equal(out[:, :longest], ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_and_its_answer_read_at_once(side: str):
    """What was generated is what the model itself finds likeliest, in one call with the segments it was given."""
    model, ids = decoder(), tokens(0, 2, 5)
    segments = torch.tensor([[0, 0, 0, 0, 0], [-1, -1, 0, 0, 0] if side == "left" else [0, 0, 0, -1, -1]])
    out = generate(model, ids, segments=segments, max_new_tokens=4)
    whole = model(out, segments=torch.cat((segments, torch.zeros(2, 4, dtype=torch.long)), dim=1)).argmax(dim=-1)
    assert torch.equal(whole[:, 5:-1], out[:, 6:])


@pytest.mark.parametrize("cache", ["auto", "static", "int8"])
def test_the_cache_can_be_chosen(cache: str):
    """Rings change nothing; eight bits change what is nearly as likely, and here nothing is."""
    local = BLOCK.model_copy(update={"mixer": Attention(heads=2, pattern=Window(before=2, after=0))})
    model, ids = decoder(decoder=STACK.model_copy(update={"blocks": (local, BLOCK)})), tokens(0, 2, 5)
    made = []
    new_cache = model.new_cache
    model.new_cache = lambda *sizes, **options: made.append(new_cache(*sizes, **options)) or made[-1]
    out = generate(model, ids, max_new_tokens=9, cache=cache)
    assert out[:, 5:].tolist() == [loop(model, row, 9) for row in ids]
    assert bool(made[0].rings) == (cache != "static")
    assert (made[0].layers[0].keys.numbers.dtype == torch.int8) == (cache == "int8")


# -- where rows end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decoder, pair])
@given(
    filler=st.sampled_from([0, 7, None]),
    stop=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3, unique=True),
    seed=seeds,
)
def test_stop_ids(make, filler: int | None, stop: list[int], seed: int):
    """A row ends with its first stop id and is padded, by the first stop id where no id means padding; decoding ends
    when all rows have. Rows that go on are not disturbed."""
    model, ids = make(special=Special(pad=filler, start=1)), tokens(seed, 4, 3)
    prompt = 1 if model.encoder else 3

    def answers(**options) -> list[list[int]]:
        hot = {"max_new_tokens": 6, "temperature": 3.0, "seed": seed}
        return generate(model, ids, **hot, **options)[:, prompt:].tolist()

    expected, longest = [], 0
    for row in answers():
        end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
        expected.append(row[:end] + [stop[0] if filler is None else filler] * (len(row) - end))
        longest = max(longest, end)
    assert answers(stop=stop) == [row[:longest] for row in expected]


def test_no_stop_ids_unless_given():
    """Not even the end of the text, which the config knows."""
    model = decoder(special=Special(eos=2, pad=0), head=LM(bias=True))
    with torch.no_grad():
        model.head.bias[2] = 1e3
    assert generate(model, tokens(0, 2, 3), max_new_tokens=5)[:, 3:].tolist() == [[2] * 5] * 2


@pytest.mark.parametrize("make", [decoder, pair])
def test_no_new_tokens(make):
    model, ids = make(), tokens(0, 2, 3)
    out = generate(model, ids, max_new_tokens=0)
    assert torch.equal(out, torch.ones(2, 1, dtype=torch.long) if model.encoder else ids)


# -- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decoder, pair])
def test_sampling_is_reproducible(make):
    """The same from the same seed, other from another; torch's generator is left alone."""
    model, ids = make(), tokens(0, 3, 4)
    before = torch.get_rng_state()
    first, second, other = (generate(model, ids, max_new_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sampling_follows_the_softmax(temperature: float):
    """Frequencies of the first token over many rows, by a chi-square test: softmax(logits / temperature)."""
    model, n = decoder(), 4000
    with torch.no_grad():
        model.head.table.mul_(0.3)  # so that many tokens are likely
        p = (model(tokens(0, 1, 3))[0, -1] / temperature).softmax(dim=-1)
    ids = tokens(0, 1, 3).expand(n, 3)
    out = generate(model, ids, max_new_tokens=1, temperature=temperature, seed=0)
    observed, expected = torch.bincount(out[:, -1], minlength=VOCAB).double(), n * p
    frequent = expected > 5
    assert frequent.sum() >= 4
    chi = float(((observed - expected).square() / expected)[frequent].sum())
    freedom = int(frequent.sum())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_a_low_temperature_is_greedy():
    model, ids = decoder(), tokens(0, 4, 3)
    cold = generate(model, ids, max_new_tokens=6, temperature=1e-4, seed=0)
    assert torch.equal(cold, generate(model, ids, max_new_tokens=6))


def test_a_row_draws_its_own_in_any_batch():
    model, ids, seeds_ = decoder(), tokens(0, 5, 3), torch.arange(5) * 1000
    together = generate(model, ids, max_new_tokens=8, temperature=1.5, seed=seeds_)
    for i in (4, 1, 0):
        alone = generate(model, ids[i : i + 1], max_new_tokens=8, temperature=1.5, seed=seeds_[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


@given(st.integers(1, 6), seeds)
def test_a_prompt_is_read_in_chunks_of_any_size(chunk: int, seed: int):
    model, ids = decoder(), tokens(seed, 3, 6)
    segments = torch.tensor([[0] * 6, [-1] * 4 + [0] * 2, [0] * 3 + [-1] * 3])
    whole = generate(model, ids, max_new_tokens=4, segments=segments)
    assert torch.equal(whole, generate(model, ids, max_new_tokens=4, segments=segments, chunk=chunk))


def test_a_spoilt_row_does_not_spoil_the_others():
    model, ids = decoder(special=Special(pad=0)), torch.tensor([[1, 2], [3, 4], [1, 2]])
    fine = generate(model, ids, max_new_tokens=4)
    with torch.no_grad():
        model.target.table.weight[3] = torch.nan
    with pytest.raises(NonFiniteLogits, match="row 1: ") as told:
        generate(model, ids, max_new_tokens=4)
    assert told.value.rows == [1]
    assert torch.equal(told.value.ids[::2], fine[::2])
    assert told.value.ids[1].tolist() == [3, 4, 0, 0, 0, 0]


# -- manners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored(training: bool):
    """Decoding runs without dropout and leaves the model as it was, also after an error."""
    model, ids = decoder().train(training), tokens(0, 2, 3)
    out = generate(model, ids, max_new_tokens=4)
    assert model.training is training
    assert torch.equal(out, generate(model.eval(), ids, max_new_tokens=4))
    model.train(training)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(model, ids + VOCAB)
    assert model.training is training
    assert all(module.training is training for module in model.modules())


def test_a_model_may_be_trained_on_what_it_generated():
    """The ids are plain tensors, with no graph behind them and no ban on one ahead."""
    model = decoder()
    out = generate(model, tokens(0, 1, 2), max_new_tokens=3)
    assert not out.requires_grad
    model(out).logsumexp(dim=-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


WRONG = {
    "no decoder": (
        lambda: generate(build(ModelConfig(width=8, source=READ, encoder=STACK, head=LM())), tokens(0, 1, 2)),
        "decoding needs a decoder with an `lm` head",
    ),
    "another head": (lambda: generate(decoder(head=MaskedLM()), tokens(0, 1, 2)), "needs a decoder with an `lm` head"),
    "no start": (lambda: generate(pair(special=Special()), tokens(0, 1, 2)), "decoding needs `special.start`"),
    "negative length": (lambda: generate(decoder(), tokens(0, 1, 2), max_new_tokens=-1), "must not be negative"),
    "negative temperature": (lambda: generate(decoder(), tokens(0, 1, 2), temperature=-0.1), "temperature = -0.1"),
    "a misspelt option": (lambda: generate(decoder(), tokens(0, 1, 2), temprature=1.0), "did you mean 'temperature'"),
    "an option in vain": (lambda: generate(decoder(), tokens(0, 1, 2), top_k=3), "needs a temperature above 0"),
    "a seed for other rows": (
        lambda: generate(decoder(), tokens(0, 2, 2), temperature=1.0, seed=torch.arange(3)),
        "a whole number for each of 2 rows",
    ),
    "a row of pads": (
        lambda: generate(decoder(), tokens(0, 2, 2), segments=torch.tensor([[0, 0], [-1, -1]])),
        "prompt 1 is empty",
    ),
    "a vector of ids": (lambda: generate(decoder(), tokens(0, 2)), "ids must be integers"),
    "a vector of sources": (lambda: generate(pair(), tokens(0, 2)), "ids must be integers"),
    "an empty prompt": (lambda: generate(decoder(), tokens(0, 1, 0)), "ids are empty"),
    "float ids": (lambda: generate(pair(), tokens(0, 1, 2).float()), "ids must be integers"),
    "segments of another shape": (
        lambda: generate(decoder(), tokens(0, 2, 3), segments=torch.zeros(2, 2, dtype=torch.long)),
        r"segments has shape \[2, 2\], expected \[2, 3\]",
    ),
    "source segments of another shape": (
        lambda: generate(pair(), tokens(0, 2, 3), segments=torch.zeros(2, 2, dtype=torch.long)),
        r"segments has shape \[2, 2\], expected \[2, 3\]",
    ),
    "too long for its positions": (
        lambda: generate(decoder(decoder=STACK.model_copy(update={"position": Learned(length=6)})), tokens(0, 1, 3)),
        "position 6 is past the end of 6 learned positions",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
