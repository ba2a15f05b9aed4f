"""The verb that shows where a run's model looks, on runs of all shapes and tasks."""

import shutil
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

import anyformer as af
from anyformer.config import Learned
from anyformer.data.tokenizer import train_tokenizer
from anyformer.nn.inspection import plot
from anyformer.nn.transforms.substitute import explain_model
from anyformer.recipe import Bytes, Classify, Embed, MaskedLanguageModel, Recipe, Regress, SpanCorruption
from anyformer.runs.run import Run
from anyformer.runs.run_inspection import MOST, read, token_names
from tests.test_cli import done, refused, run
from tests.training import small

WIDE = "나는 학교에 간다. 我去学校。 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def trained(recipe: Recipe, out: Path) -> Path:
    if not out.exists():
        small.run(recipe, out)
    return out


@pytest.fixture(scope="module")
def pair(folder: Path) -> Path:
    return trained(small.pairs("encoder-decoder", steps=2, valid=None), folder / "pair")


@pytest.fixture(scope="module")
def korean(folder: Path) -> Path:
    """A language model of 16 positions, of wide characters."""
    recipe = small.text(folder, steps=2)
    (folder / "text.txt").write_text(WIDE * 20, encoding="utf-8")
    stack = recipe.model.decoder.model_copy(update={"position": Learned(length=16)})
    return trained(
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"decoder": stack})}), folder / "lm"
    )


def blocks(text: str) -> list[list[str]]:
    return [block.splitlines() for block in text.split("\n\n")]


def test_an_encoder_decoder(pair: Path, tmp_path: Path) -> None:
    """Tokens of both sides, the map of the last layer across, names, links, and a figure of it."""
    pytest.importorskip("matplotlib")
    text = done("inspect", pair, "3 1 2", "--target", "2 1 3", "--out", tmp_path / "map.svg")
    tokens, shown, heads, links, kernels, figure = blocks(text)
    modules = [f"modules: {line}" for line in explain_model(af.load(pair).model)]
    assert kernels[-len(modules) :] == modules
    assert all(line.startswith("attention kernel: sdpa (") for line in kernels[: -len(modules)])
    assert tokens == ["encoder  0 3  1 1  2 2  3 <eos>", "decoder  0 <bos>  1 2  2 1  3 3"]
    assert shown[0] == "decoder.0.cross: the mean of 2 heads; a row for each query, weights in percent"
    maps = af.attention_maps(af.load(pair), "3 1 2", target="2 1 3")["cross"][-1, 0]  # [h, t, s]
    for row, line in zip(maps.mean(dim=0), shown[3:-1], strict=True):
        assert [int(n) for n in line.split()[2:]] == [round(100 * float(w)) for w in row]
    assert shown[-1].startswith("a row: how much the token at its left (the query) reads of each token above")
    assert heads[0].startswith("heads of layer 0: 0 ")
    assert len(links) == 11
    assert float(links[1].split()[0]) == pytest.approx(float(maps.max()), abs=0.005)
    assert figure == [f"figure: {tmp_path / 'map.svg'}"]
    assert "bos" in (tmp_path / "map.svg").read_text(encoding="utf-8")


def test_an_answer_is_what_the_run_says(pair: Path) -> None:
    loaded = af.load(pair)
    (said,) = loaded.predict(["3 1 2"])
    (tokens, *_) = blocks(done("inspect", pair, "3 1 2"))
    assert tokens[1].split()[4::2] == said.split()
    assert read(loaded, "3 1 2").tokens["decoder"][1:] == said.split()


def test_one_stack_layer_and_head(pair: Path) -> None:
    _, shown, heads, links, _ = blocks(
        done("inspect", pair, "3 1 2", "--stack", "encoder", "--layer", "0", "--head", "1")
    )
    assert shown[0].startswith("encoder.0.mixer: head 1; ")
    assert all("layer 0  head 1" in link for link in links[1:])
    assert heads[0].startswith("heads of layer 0: 1 ")


def test_a_decoder_and_wide_tokens(korean: Path, tmp_path: Path) -> None:
    """Every line of the map takes the same cells, whatever the characters take."""
    tokens, shown, *_ = blocks(done("inspect", korean, "나는 学", "--out", tmp_path / "map.png"))
    assert tokens == ["decoder  0 나  1 는  2 ▁  3 学"]
    assert {cell_len(line) for line in shown[2:-1]} == {cell_len(shown[1])}
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_text_is_cut_and_said(korean: Path) -> None:
    result = run("inspect", korean, WIDE * 3)
    assert result.exit_code == 0
    count = len(WIDE * 3)
    assert result.stderr == (
        f"warning: text has {count} tokens, and the decoder has 16 learned positions: "
        f"only its first 16 of {count} characters are read\n"
    )
    assert blocks(result.stdout)[0][0].split()[-2] == "15"
    longer = run("inspect", korean, "나는", "--target", WIDE * 3)
    assert "warning: target has " in longer.stderr
    assert blocks(longer.stdout)[0][0].split()[-2] == "15"


def test_no_more_is_read_than_can_be_looked_at(folder: Path) -> None:
    loaded = af.load(trained(small.text(folder, steps=1), folder / "free"))
    found = read(loaded, "the " * MOST)
    assert len(found.tokens["decoder"]) == MOST
    assert f"and {MOST:,} are looked at" in found.notes[0]


TASKS = {
    "classify": (lambda home: small.labelled(home, Classify(), small.parities(), steps=1), "3 1", "<bos> 3 1 <eos>"),
    "embed": (lambda home: small.labelled(home, Embed(), small.spellings(), steps=1), "3 1", "<bos> 3 1 <eos>"),
    "apart": (lambda home: small.labelled(home, APART, small.distances(), steps=1), "3 1", "<bos> 3 1 <eos>"),
    "mlm": (lambda home: small.corrupted(home, MaskedLanguageModel(), steps=1), "n1 <mask>", "<bos> n1 <mask> <eos>"),
    "spans": (
        lambda home: small.corrupted(home, SpanCorruption(), steps=1),
        "n1 <extra_id_0>",
        "n1 <extra_id_0> <eos>",
    ),
    "tag": (lambda home: small.tagging(home, steps=1, spelled=True), "12 3", "<bos> 1 2 ▁ 3 <eos>"),
    "reverse": (lambda home: small.pairs("decoder", steps=1, valid=None), "3 1", "3 1 <sep>"),
}
APART = Regress(pairs=True, apart=True)


@pytest.mark.parametrize("kind", TASKS)
def test_other_tasks(folder: Path, kind: str) -> None:
    """The tokens are those that the task's own batches hold."""
    home = folder / kind
    home.mkdir(exist_ok=True)
    recipe, text, tokens = TASKS[kind]
    (first, *_), *_, links, _ = blocks(done("inspect", trained(recipe(home), home / "run"), text))
    assert first.split()[2::2][: len(tokens.split())] == tokens.split()
    assert links[0] == "the strongest links, query → key:"


def test_one_task_of_a_mixture(folder: Path) -> None:
    mixed = trained(small.mixed(folder, steps=1), folder / "mixed")
    assert done("inspect", mixed, "a", "--task", "copy").startswith("encoder  0 <task:copy>  1 a")
    (line,) = refused("inspect", mixed, "a")
    assert line == "--task: is missing: choose one of the mixture: large, copy"


def test_wrong_input(pair: Path, korean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(*arguments: str | Path) -> str:
        (only,) = refused("inspect", *arguments)
        return only

    assert line(pair, " ") == "TEXT: is blank: there is nothing to look into"
    assert line(pair, "1", "--layer", "1") == "--layer = 1: must be 0, where cross attention is"
    assert line(pair, "1", "--head", "2") == "--head = 2: decoder.0.cross has heads 0 to 1"
    assert line(pair, "1", "--head", "-1") == "--head = -1: decoder.0.cross has heads 0 to 1"
    assert line(korean, "나", "--stack", "cross") == "--stack = 'cross': there is attention in decoder only"
    assert line(pair, "1", "--out", "map.jpg") == "--out = map.jpg: must end in .png or .svg"
    assert line(pair, "1", "--task", "sort") == "--task = 'sort': the run is of one task, seq2seq"
    assert line(tmp_path / "none", "1").endswith("none: there is no such folder")
    monkeypatch.setattr(plot, "pyplot", lambda: (_ for _ in ()).throw(ImportError("figures need matplotlib: pip ...")))
    result = run("inspect", pair, "1", "--out", tmp_path / "map.png")
    assert (result.exit_code, result.stderr) == (2, "--out: figures need matplotlib: pip ...\n")


def test_a_run_that_is_being_written(pair: Path, tmp_path: Path) -> None:
    """Whatever is there of it so far: one line."""
    for name in ("config.json", "task.json", "tokenizer.json", "model.safetensors"):
        half = tmp_path / name
        shutil.copytree(pair, half)
        shutil.rmtree(half / "state", ignore_errors=True)
        (half / "manifest.json").unlink()
        (line,) = refused("inspect", half, "1")
        assert line == f"{half}: is not a finished run: it has no manifest.json"
        shutil.copy(pair / "manifest.json", half)
        (half / name).write_bytes((half / name).read_bytes()[:20])
        (line,) = refused("inspect", half, "1")
        assert line == f"{half / name}: is not the file that was written: it was changed, swapped or cut short"


def test_a_target_is_for_models_that_write(folder: Path) -> None:
    home = folder / "labels"
    home.mkdir()
    made = trained(small.labelled(home, Classify(), small.parities(), steps=1), home / "run")
    assert refused("inspect", made, "3", "--target", "4") == ["--target: is for models that write: this one reads once"]


def test_logits_that_are_not_finite(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = af.load(pair)
    with torch.no_grad():
        loaded.model.head.table.fill_(torch.nan)
    monkeypatch.setattr("anyformer.runs.run.load", lambda folder: Run(loaded.model, loaded.task, loaded.spec, folder))
    result = run("inspect", pair, "1")
    assert (result.exit_code, result.stderr) == (1, "the model's logits are not finite: it gives no answer\n")


def test_maps_of_a_run_are_those_of_its_model(pair: Path) -> None:
    loaded = af.load(pair)
    found = read(loaded, "3 1 2", "2")
    maps = af.attention_maps(loaded, "3 1 2", target="2", stacks=["encoder"], heads=[1])
    assert torch.equal(maps["encoder"], af.attention_maps(loaded.model, *found.inputs)["encoder"][:, :, [1]])
    with pytest.raises(ValueError, match="a run reads one text"):
        af.attention_maps(loaded, *found.inputs)


def test_the_bytes_of_a_character_are_named_by_it() -> None:
    tokenizer = train_tokenizer(Bytes(), ["a"])
    ids = tokenizer.encode("a한é")
    assert token_names(tokenizer, ids) == ["a", "한[1/3]", "한[2/3]", "한[3/3]", "é[1/2]", "é[2/2]"]
    assert token_names(tokenizer, ids[2:5]) == ["<0x95>", "<0x9C>", "<0xC3>"]  # no whole character
