"""Texts in, texts out: whole or in pieces, alone or beside others, up to a stop string; and how likely they are."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, strategies as st

import anyformer as af
from anyformer import recipe
from anyformer.cli import app
from anyformer.config import LM, Attention, Block, ConfigError, Learned, ModelConfig, Rotary, Special, Stack, Tokens
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.generation.generate import generate
from anyformer.recipe import LanguageModel, Seq2Seq, Tokenizer
from anyformer.runs.run import Run, write_folder, write_model
from anyformer.tasks.text_stream import IncrementalDecoder, StopStrings
from tests.strategies import build
from tests.test_cli import done, refused, run as invoke

TEXT = "the quick brown fox jumps over the lazy dog. 안녕 세상! 你好 🙂 naïve café, isn't it? " * 4
KINDS: dict[str, Tokenizer] = {
    "chars": recipe.Characters(),
    "bytes": recipe.Bytes(),
    "words": recipe.Words(),
    "bpe": recipe.BPE(size=300),
    "unigram": recipe.Unigram(size=320),
    "wordpiece": recipe.WordPiece(size=100),
}
TOKENIZERS: dict[str, TextTokenizer] = {kind: train_tokenizer(spec, [TEXT]) for kind, spec in KINDS.items()}
PROMPTS = ["the quick", "dog", "안녕 you", "jumps over the lazy fox"]
HOT = {"temperature": 1.0, "max_new_tokens": 16}


def writer(kind: str = "bytes", shape: str = "lm", length: int | None = None, ends: bool = False) -> Run:
    """A model that has learnt nothing: it says whatever it may, bytes that are no characters among it, <eos> if it
    `ends`, but no other special id."""
    tokenizer = TOKENIZERS[kind]
    both = shape == "encoder-decoder"
    position = Rotary() if length is None else Learned(length=length)
    attention, read = Attention(heads=2), Tokens(vocab=tokenizer.size)

    def stack(cross: bool) -> Stack:
        return Stack(depth=1, blocks=(Block(mixer=attention, cross=attention if cross else None),), position=position)

    config = ModelConfig(
        width=16,
        source=read if both else None,
        target=read,
        encoder=stack(False) if both else None,
        decoder=stack(both),
        head=LM(bias=True),
        special=Special(pad=tokenizer.pad, bos=tokenizer.bos, eos=tokenizer.eos, start=tokenizer.bos),
    )
    model = build(config)
    unsaid = {tokenizer.pad, tokenizer.bos, tokenizer.sep, tokenizer.unk, tokenizer.mask, tokenizer.eos}
    with torch.no_grad():
        model.head.bias[[id for id in unsaid if id is not None and (id != tokenizer.eos or not ends)]] = -1e4
    spec = LanguageModel() if shape == "lm" else Seq2Seq()
    return Run(model, spec.build(tokenizer), spec, Path("nowhere"))


SHAPES = ["lm", "decoder", "encoder-decoder"]

# -- ids to pieces of text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_are_the_text(kind: str, data: st.DataObject) -> None:
    """Of any ids after any others, cut anywhere."""
    tokenizer = TOKENIZERS[kind]
    any_ids = st.lists(st.integers(0, tokenizer.size - 1), max_size=12)
    before, parts = data.draw(any_ids), data.draw(st.lists(any_ids, max_size=6))
    before = tokenizer.encode(tokenizer.decode(before))  # a text is whole
    text = IncrementalDecoder(tokenizer, before)
    said = "".join([text.push(part) for part in parts] + [text.rest()])
    assert tokenizer.decode(before) + said == tokenizer.decode([*before, *(i for part in parts for i in part)])


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
@given(text=st.text("aé안🙂 \n", min_size=1, max_size=12))
def test_never_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    unfolding, said = IncrementalDecoder(tokenizer), ""
    for id in tokenizer.encode(text):
        said += unfolding.push([id])
        assert text.startswith(said)
    assert said == text
    assert unfolding.rest() == ""


def test_a_character_comes_with_its_last_byte() -> None:
    unfolding = IncrementalDecoder(TOKENIZERS["bytes"])
    assert [unfolding.push([id]) for id in TOKENIZERS["bytes"].encode("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_the_work_does_not_grow() -> None:
    """Ten thousand ids, a few of them decoded at a time."""
    tokenizer = TOKENIZERS["bytes"]
    unfolding = IncrementalDecoder(tokenizer)
    for id in tokenizer.encode(TEXT * 10):
        unfolding.push([id])
        assert len(unfolding._ids) < 10


# -- stop strings ---------------------------------------------------------------------------------------------------


def before_stop(text: str, stops: Sequence[str]) -> str:
    """By looking at every beginning of the text."""
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))]
    return text


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@example(["ab", "cab", "d"], ["bc", "abd"])
def test_text_ends_at_the_first_stop_string_however_it_is_cut(pieces: list[str], strings: list[str]) -> None:
    stops, text = StopStrings(strings), "".join(pieces)
    said, expected = "", before_stop(text, strings)
    for piece in pieces:
        said += stops.push(piece)
        assert expected.startswith(said)
    assert stops.found == any(string in text for string in strings)
    assert said + stops.rest() == expected


def test_no_more_is_held_back_than_may_be_a_stop_string() -> None:
    stops = StopStrings(["ab", "\n\n"])
    assert [stops.push(c) for c in "xay\nz\n\n"] == ["x", "", "ay", "", "\nz", "", ""]
    assert stops.found


# -- generate and stream --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_what_decoding_adds(kind: str) -> None:
    run = writer(kind, ends=True)
    tokenizer = run.tokenizer
    prompts = PROMPTS[1:3]
    for prompt, said, whole in zip(prompts, run.generate(prompts), run.predict(prompts), strict=True):
        ids = tokenizer.encode(prompt)
        out = generate(run.model, torch.tensor([ids]), max_new_tokens=100, stop=[tokenizer.eos])
        assert tokenizer.decode(ids) + said == tokenizer.decode(out[0].tolist()) == whole


@pytest.mark.parametrize(("kind", "shape"), [*((kind, "lm") for kind in KINDS), *(("bytes", s) for s in SHAPES[1:])])
def test_a_stream_is_what_generate_gives(kind: str, shape: str) -> None:
    run = writer(kind, shape)
    for seed in range(2):
        (plain,) = run.generate(["the lazy dog"], seed=seed, **HOT)
        assert plain
        pieces = list(run.stream("the lazy dog", seed=seed, **HOT))
        assert "".join(pieces) == plain
        assert all(pieces)
        assert len(pieces) > 1
        for stop in (plain[2:5], [plain[-2:], "never"]):
            cut = before_stop(plain, [stop] if isinstance(stop, str) else stop)
            assert run.generate(["the lazy dog"], stop=stop, seed=seed, **HOT) == [cut]
            assert "".join(run.stream("the lazy dog", stop=stop, seed=seed, **HOT)) == cut


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stop", [(), ("a",)])
def test_texts_together_are_as_one_by_one(shape: str, stop: tuple[str, ...]) -> None:
    """Of unequal length, and near the last position; each by a seed of its own."""
    run, seeds = writer("bpe", shape, length=24, ends=True), [5, 6, 7, 8]
    together = run.generate(PROMPTS, seed=seeds, stop=stop, **HOT)
    assert together == [
        run.generate([text], seed=seed, stop=stop, **HOT)[0] for text, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert len(set(together)) > 1


def test_seeds() -> None:
    run = writer()
    same = run.generate(["dog"] * 3, seed=1, **HOT)
    assert len(set(same)) == 3
    assert run.generate(["dog"] * 3, seed=1, **HOT) == same != run.generate(["dog"] * 3, seed=2, **HOT)
    assert run.generate(["dog"], seed=1, **HOT) == run.generate(["dog"], seed=[1], **HOT) == same[:1]
    assert run.generate([], seed=1, **HOT) == run.generate([], seed=[], **HOT) == []


def test_decoding_ends_when_all_texts_have_their_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    run = writer("chars")
    (said,) = run.generate(["dog"], max_new_tokens=40)
    calls = []
    decode = run.model.decode
    monkeypatch.setattr(run.model, "decode", lambda *a, **b: calls.append(1) or decode(*a, **b))
    run.generate(["dog"] * 2, max_new_tokens=40, stop=said[4:6])
    assert len(calls) <= 6


@pytest.mark.parametrize("most", [0, 1, 5])
def test_so_many_tokens(most: int) -> None:
    run = writer("chars")
    (said,) = run.generate(["dog"], max_new_tokens=most, stop_ids=[])
    assert len(run.tokenizer.encode(said)) == most


def test_other_stop_ids() -> None:
    run = writer("chars")
    (plain,) = run.generate(["dog"], max_new_tokens=20, stop_ids=[])
    (id,) = run.tokenizer.encode(plain[3])
    assert run.generate(["dog"], max_new_tokens=20, stop_ids=[id]) == [plain[: plain.index(plain[3])]]


def test_empty_prompts() -> None:
    lm, pair = writer("chars"), writer("words", "encoder-decoder")
    bos = torch.tensor([[lm.tokenizer.bos]])
    expected = lm.tokenizer.decode(generate(lm.model, bos, max_new_tokens=9, stop=[lm.tokenizer.eos])[0].tolist())
    assert lm.generate(["", "dog"], max_new_tokens=9)[0] == "".join(lm.stream("", max_new_tokens=9)) == expected
    assert pair.generate(["  ", "dog"])[0] == "".join(pair.stream(" ")) == ""


WRONG = {
    "a misspelt option": (lambda: writer().generate(["a"], temprature=1.0), "did you mean 'temperature'"),
    "an option in vain": (lambda: writer().generate(["a"], top_p=0.9), "top_p = 0.9: needs a temperature above 0"),
    "a stream, at the call": (lambda: writer().stream("a", top_p=0.9), "needs a temperature above 0"),
    "one text": (lambda: writer().generate("a"), "texts: must be a list of texts"),
    "fewer than no tokens": (lambda: writer().generate(["a"], max_new_tokens=-1), "max_new_tokens = -1: must not be"),
    "an empty stop string": (lambda: writer().generate(["a"], stop=["b", ""]), "stop: an empty string"),
    "too few seeds": (
        lambda: writer().generate(["a", "b"], seed=[1], temperature=1.0),
        "seed: there are 1, and 2 texts",
    ),
    "a prompt past the positions": (
        lambda: writer(length=4).generate(["a", "abcde"]),
        "text 2: has 5 tokens, and the decoder has 4 learned positions",
    ),
    "a source past the positions": (
        lambda: writer(shape="encoder-decoder", length=4).generate(["abcd"]),
        "text 1: has 5 tokens, and the encoder has 4 learned positions",
    ),
    "no such stop id": (lambda: writer().generate(["a"], stop_ids=[9999]), "stop_ids = 9999: no such id"),
    "a text past the positions": (lambda: writer(length=4).score(["abcdef"]), "text 1: has 5 tokens, and the decoder"),
    "a text of one token": (lambda: writer().score(["ab", "a"]), "text 2: is too short"),
    "an empty answer": (lambda: writer().score(["ab"], [""]), "answer 1: is too short"),
    "no answers": (lambda: writer(shape="decoder").score(["ab"]), "answers: are missing"),
    "too few answers": (lambda: writer().score(["ab"], []), "answers: there are 0, and 1 texts"),
    "a stride alone": (lambda: writer().score(["ab"], stride=3), "stride = 3: needs a window"),
    "a window of pairs": (
        lambda: writer(shape="encoder-decoder").score(["ab"], ["c"], window=3),
        "window = 3: only a decoder without an encoder",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_logits_that_are_no_numbers() -> None:
    run = writer("chars")
    (id,) = run.tokenizer.encode("x")
    with torch.no_grad():
        run.model.target.table.weight[id] = torch.nan
    with pytest.raises(FloatingPointError, match="text 2: the model's logits are not finite"):
        run.generate(["o", "x"], max_new_tokens=1)


# -- score ----------------------------------------------------------------------------------------------------------


def log_probabilities(run: Run, before: list[int], ids: list[int], source: list[int] | None = None) -> list[float]:
    """Of each id after those before it, one at a time."""
    found = []
    for at, id in enumerate(ids):
        row = torch.tensor([before + ids[:at]])
        with torch.no_grad():
            logits = run.model(row) if source is None else run.model(torch.tensor([source]), row)
        found.append(float(logits[0, -1].log_softmax(dim=-1)[id]))
    return found


def test_score_of_texts() -> None:
    run = writer("bpe")
    for text, found in zip(PROMPTS, run.score(PROMPTS), strict=True):
        ids = run.tokenizer.encode(text)
        assert list(found.ids) == ids[1:]
        assert found.logprobs == pytest.approx(log_probabilities(run, ids[:1], ids[1:]))
        assert found.total == pytest.approx(sum(found.logprobs))
        assert found.perplexity == pytest.approx(math.exp(-found.total / len(found.ids)))
    by_windows = run.score(PROMPTS, window=4, stride=2)
    assert [len(found.ids) for found in by_windows] == [len(found.ids) for found in run.score(PROMPTS)]
    whole = run.score(PROMPTS, window=1000)
    assert [found.total for found in whole] == pytest.approx([found.total for found in run.score(PROMPTS)])


@pytest.mark.parametrize("shape", SHAPES)
def test_score_of_answers(shape: str) -> None:
    run, answers = writer("bytes", shape), ["ab", "c", "안", "de fg"]
    tokenizer = run.tokenizer
    for text, answer, found in zip(PROMPTS, answers, run.score(PROMPTS, answers), strict=True):
        source, target = tokenizer.encode(text), tokenizer.encode(answer)
        if shape == "lm":
            before, given_ = source, None
        else:
            target = [*target, tokenizer.eos]
            both = shape == "encoder-decoder"
            before, given_ = ([tokenizer.bos], [*source, tokenizer.eos]) if both else ([*source, tokenizer.sep], None)
        assert list(found.ids) == target
        assert found.logprobs == pytest.approx(log_probabilities(run, before, target, given_))


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, out = writer("bytes", length=64), tmp_path_factory.mktemp("runs") / "글 文"
    weights = {name: x.float() for name, x in run.model.state_dict().items()}
    write_folder(out, lambda to: write_model(to, weights, run.config, run.spec, run.task))
    return out


def test_the_verb(folder: Path) -> None:
    run = af.load(folder, "cpu")
    assert done("generate", folder, "--prompt", "dog") == run.generate(["dog"])[0] + "\n"
    how = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    how |= {"repetition_penalty": 1.2, "stop": ["e", "안녕"]}
    options = [
        part
        for name, value in how.items()
        for one in (value if isinstance(value, list) else [value])
        for part in (f"--{name.replace('_', '-')}", str(one))
    ]
    said = run.generate(["dog"] * 2, **how)
    assert done("generate", folder, "--prompt", "dog", *options) == said[0] + "\n"
    assert done("generate", folder, "--prompt", "dog", *options, "-n", "2") == f"{said[0]}\n---\n{said[1]}\n"


def test_on_a_terminal_it_streams_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", str(folder), "--prompt", "dog", "--temperature", "0.5", "--seed", "1"]
    plain = done(*options)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delattr(Run, "generate")
    app(options, standalone_mode=False)
    assert capsys.readouterr().out == plain


def test_what_is_wrong_is_one_line(folder: Path, tmp_path: Path) -> None:
    def told(*options: str) -> str:
        (line,) = refused("generate", folder, *options)
        return line

    prompt = ["--prompt", "dog"]
    needs = "needs a temperature above 0: at 0 nothing is sampled"
    assert told(*prompt, "--seed", "1") == f"--seed = 1: {needs}"
    assert told(*prompt, "-n", "3") == f"--samples = 3: {needs}"
    assert told(*prompt, "-n", "0") == "--samples = 0: must be at least 1"
    assert told(*prompt, "--top-p", "0.9").startswith("--top-p = 0.9: needs a temperature above 0")
    assert told(*prompt, "--temperature", "-1").startswith("--temperature = -1")
    assert told(*prompt, "--max-new-tokens", "-1") == "--max-new-tokens = -1: must not be negative"
    assert told(*prompt, "--stop", "") == "--stop: an empty string occurs everywhere: leave it out"
    too_long = "--prompt: has 70 tokens, and the decoder has 64 learned positions"
    assert told("--prompt", "x" * 70) == told("--prompt", "x" * 70, "--temperature", "1", "-n", "3") == too_long
    assert "there is no such folder" in refused("generate", tmp_path / "none", *prompt)[0]
    assert invoke("generate", folder).exit_code == 2
