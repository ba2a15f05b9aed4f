"""Beginning with another run: which weights are taken, what stays as it is, and how fast each layer learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyformer.config import ConfigError, Embedder, ModelConfig, Rotary, Transform, YarnScaling, io
from anyformer.data.tokenizer import train_tokenizer
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.recipe import Adam, AdamW, Classify, Encoder, Recipe, Regress, RunTokenizer, Words
from anyformer.runs.run import Run, load, write_folder, write_model
from anyformer.training.finetune import lr_scale
from anyformer.training.job import Job
from anyformer.training.loop import fit
from anyformer.training.train import evaluate, merge
from tests.training.small import (
    adapter,
    assert_same_run,
    distances,
    labelled,
    make,
    pairs,
    parities,
    quiet,
    run,
    said,
    settings,
)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def begun(recipe: Recipe, first: Path, **train: Any) -> Recipe:
    train = {**dict(recipe.train), "init_from": str(first), **train}
    return recipe.model_copy(update={"tokenizer": RunTokenizer(), "train": settings(**train)})


def foreign(recipe: Recipe, folder: Path, **changes: Any) -> Run:
    """A run as an import leaves it: an encoder with a pooler, and no recipe."""
    spec, task = Encoder(), Encoder().build(train_tokenizer(Words(), ["0 1 2 3 4 5 6 7 8 9"]))
    source = recipe.model.source.model_copy(update={"vocab": task.tokenizer.size})
    head = Embedder(pool="mean", transform=Transform())
    config = recipe.model.model_copy(update={"source": source, "head": head, **changes})
    torch.manual_seed(7)
    model = Transformer(config)
    write_folder(folder, lambda path: write_model(path, model.state_dict(), config, spec, task))
    return load(folder)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return io.override(labelled(tmp_path, Classify(), parities()), ["model.head.transform=dense"])


# -- which weights are taken ------------------------------------------------------------------------------------------


def test_a_new_head_on_an_old_body(recipe: Recipe, tmp_path: Path) -> None:
    first, console = foreign(recipe, tmp_path / "first"), quiet()
    job = make(begun(recipe, tmp_path / "first"), tmp_path / "run", console=console)
    given, own = values(first.model), values(job.model)
    new = [name for name in own if name not in given]
    assert new == ["head.last.1.weight", "head.last.1.bias"]
    assert all(torch.equal(own[name], given[name]) for name in given)  # the pooler's, too
    assert f", not in {tmp_path / 'first'}, to be trained: {', '.join(new)}" in said(console)
    assert f"tokenizer: that of {tmp_path / 'first'}" in said(console)
    assert job.task.tokenizer.to_json() == first.tokenizer.to_json()
    fit(job)


def test_what_does_another_thing_is_new(recipe: Recipe, tmp_path: Path) -> None:
    """A transform with another activation has weights of the same names and shapes, which mean something else."""
    foreign(recipe, tmp_path / "first", head=Embedder(pool="mean", transform=Transform(activation="gelu")))
    console = quiet()
    make(begun(recipe, tmp_path / "first"), tmp_path / "run", console=console)
    assert ", to be trained: " in said(console)
    assert "head.transform.linear.weight, head.transform.linear.bias, head.last.1.weight" in said(console)


@pytest.mark.parametrize("alike", [True, False])
def test_labels_decide_whether_a_head_is_new(recipe: Recipe, tmp_path: Path, alike: bool) -> None:
    first, console = run(recipe, tmp_path / "first"), quiet()
    (tmp_path / "other").mkdir()
    rows = parities() if alike else [(text, {"odd": "1", "even": "0"}[label]) for text, label in parities()]
    again = io.override(labelled(tmp_path / "other", Classify(), rows), ["model.head.transform=dense"])
    job = make(begun(again, tmp_path / "first"), tmp_path / "run", console=console)
    last = "head.last.1.weight"
    assert torch.equal(values(job.model)[last], values(first.model)[last]) == alike
    assert (", to be trained: " in said(console)) == (not alike)
    body = [name for name in values(first.model) if not name.startswith("head.last")]
    assert all(torch.equal(values(job.model)[name], values(first.model)[name]) for name in body)


def test_a_decoder_that_wrote_may_label(tmp_path: Path) -> None:
    first = run(pairs("decoder", steps=2), tmp_path / "first")
    changes = {"head": io.loads(ModelConfig, io.dumps(labelled(tmp_path, Classify(), parities()).model)).head}
    model = pairs("decoder").model.model_copy(update=changes)
    recipe = labelled(tmp_path, Classify(), parities()).model_copy(update={"model": model})
    job = make(begun(recipe, tmp_path / "first"), tmp_path / "run")
    taken = [name for name in values(job.model) if not name.startswith("head")]
    assert len(taken) > 5
    assert all(torch.equal(values(job.model)[name], values(first.model)[name]) for name in taken)
    fit(job)


@pytest.mark.parametrize("change", ["model.encoder.depth=3", "model.width=16", "model.encoder.position=alibi"])
def test_another_body_is_refused(recipe: Recipe, tmp_path: Path, change: str) -> None:
    foreign(recipe, tmp_path / "first")
    with pytest.raises(ConfigError, match=r"train\.init_from = .*: its model differs: ") as caught:
        make(io.override(begun(recipe, tmp_path / "first"), [change]), tmp_path / "run")
    assert change.removeprefix("model.").partition("=")[0] in str(caught.value)
    dropout = "model.encoder.blocks.*.dropout=0.4"
    make(io.override(begun(recipe, tmp_path / "first"), [dropout]), tmp_path / "run")


def test_a_run_that_is_not_there(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.init_from = '.*nowhere': .*there is no such folder"):
        make(begun(recipe, tmp_path / "nowhere"), tmp_path / "run")


def test_a_finetuned_run_resumes(recipe: Recipe, tmp_path: Path) -> None:
    foreign(recipe, tmp_path / "first")
    spec = begun(recipe, tmp_path / "first", freeze=["source", "encoder.blocks.0"], layer_decay=0.5, save_every=4)
    run(spec, tmp_path / "straight")
    shorter = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 4})})
    run(shorter, tmp_path / "halting")
    run(spec, tmp_path / "halting", resume=True)
    made = [load(tmp_path / name) for name in ("straight", "halting")]
    assert made[0].tokenizer.to_json() == made[1].tokenizer.to_json()
    assert made[0].spec == made[1].spec


# -- what stays as it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2, weight_decay=0.5), Adam(lr=1e-2)])
def test_frozen_weights_stay_to_the_last_bit(recipe: Recipe, tmp_path: Path, optimizer: AdamW | Adam) -> None:
    frozen = ["source", "encoder.blocks.0", "head.transform.*.bias"]
    foreign(recipe, tmp_path / "first")
    spec = begun(recipe, tmp_path / "first", freeze=frozen, optimizer=optimizer, ema=0.9)
    before = values(make(spec, tmp_path / "look").model)
    after = values(run(spec, tmp_path / "run").model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {
        name
        for name in before
        if name.startswith(("source.", "encoder.blocks.0.")) or name == "head.transform.linear.bias"
    }
    assert {name.partition(".")[0] for name in same} == {"source", "encoder", "head"}


def test_frozen_weights_have_no_state_and_no_gradient(recipe: Recipe, tmp_path: Path) -> None:
    job = make(io.override(recipe, ["train.freeze=['encoder']"]), tmp_path / "run")
    held = {id(p) for group in job.optimizer.param_groups for p in group["params"]}
    for name, parameter in job.model.named_parameters():
        assert (id(parameter) in held) == parameter.requires_grad == (not name.startswith("encoder."))


@pytest.mark.parametrize(
    ("patterns", "line"),
    [
        ("['source', 'encoder.block.0']", "train.freeze.1 = 'encoder.block.0': .* did you mean 'encoder.blocks.0'"),
        ("['encoder.blocks.7']", r"train\.freeze\.0 = 'encoder\.blocks\.7': the model has no such weights"),
        ("['xyz']", "parts are source, encoder, head"),
        ("['*']", r"no weight is left to train"),
    ],
)
def test_patterns_that_are_no_use(recipe: Recipe, tmp_path: Path, patterns: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make(io.override(recipe, [f"train.freeze={patterns}"]), tmp_path / "run")


# -- how fast each layer learns ---------------------------------------------------------------------------------------


def rates(job: Job) -> dict[str, float]:
    names = {id(p): name for name, p in job.model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in job.optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), Adam(lr=1e-2)])
def test_every_layer_has_its_rate(recipe: Recipe, tmp_path: Path, optimizer: AdamW | Adam) -> None:
    spec = recipe.model_copy(update={"train": settings(layer_decay=0.5, optimizer=optimizer, steps=1)})
    job = make(spec, tmp_path / "run")
    fit(job)
    found = rates(job)
    assert found.keys() == {name for name, _ in job.model.named_parameters()}
    expected = {"source.": 0.125, "encoder.blocks.0.": 0.25, "encoder.blocks.1.": 0.5, "head.": 1.0}
    for name, lr in found.items():
        assert lr == pytest.approx(1e-2 * next(share for part, share in expected.items() if name.startswith(part)))


def test_a_rate_is_what_moves_a_weight(recipe: Recipe, tmp_path: Path) -> None:
    """Adam's first step moves every weight that has a gradient by its rate."""
    spec = recipe.model_copy(update={"train": settings(layer_decay=0.5, optimizer=Adam(lr=1e-3), steps=1, clip="none")})
    job = make(spec, tmp_path / "run")
    before = values(job.model)
    fit(job)
    found = rates(job)
    for name, after in values(job.model).items():
        assert float((after - before[name]).abs().max()) == pytest.approx(found[name], rel=1e-2)


def test_both_sides_have_layers() -> None:
    config = pairs("encoder-decoder").model
    assert lr_scale("target.table.weight", config, 0.5) == lr_scale("source.table.weight", config, 0.5) == 0.25
    assert lr_scale("decoder.blocks.0.mixer.inner.qkv.weight", config, 0.5) == 0.5
    assert lr_scale("encoder.final_norm.weight", config, 0.5) == lr_scale("head.table", config, 0.5) == 1


def test_no_decay_is_one_rate_for_all(tmp_path: Path) -> None:
    job = make(pairs(), tmp_path / "run")
    assert {group["lr_scale"] for group in job.optimizer.param_groups} == {1}


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_only_the_adapter_and_a_new_head_learn(tmp_path: Path) -> None:
    spec = adapter(tmp_path, optimizer=AdamW(lr=1e-2, weight_decay=0.5))
    console = quiet()
    job = make(spec, tmp_path / "run", console=console)
    before, given = values(job.model), values(load(tmp_path / "first").model)
    assert all(torch.equal(before[name], given[name]) for name in given if not name.startswith("head."))
    assert "first, to be trained: head.last.1.weight, head.last.1.bias\n" in said(
        console
    )  # and not the adapter's, which are to be new
    held = [p for group in job.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == count(job.model.config).trained < job.model.num_parameters() / 2
    fit(job)
    changed = {name for name, x in values(job.model).items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if ".lora." in name or name.startswith("head.")}


def test_a_head_that_writes_stays(tmp_path: Path) -> None:
    first = run(pairs("decoder", steps=2), tmp_path / "first")
    recipe = pairs("decoder", steps=4, init_from=str(tmp_path / "first"))
    spec = io.override(recipe, ["model.adapter={rank=2, targets=['*.mixer']}"])
    made = run(spec, tmp_path / "run")
    own, given = values(made.model), values(first.model)
    assert all(torch.equal(own[name], given[name]) for name in given)
    assert any(bool(x.any()) for name, x in own.items() if name.endswith(".lora.b"))
    # which another run may begin from, if it has the same adapter
    again = pairs("decoder", steps=4, init_from=str(tmp_path / "run"))
    job = make(io.override(again, ["model.adapter={rank=2, targets=['*.mixer']}"]), tmp_path / "again")
    assert all(torch.equal(x, own[name]) for name, x in values(job.model).items())
    for change in ("rank=4, targets=['*.mixer']", "rank=2"):
        with pytest.raises(ConfigError, match=r"train\.init_from = .*: its model differs: adapter\."):
            make(io.override(again, [f"model.adapter={{{change}}}"]), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"its model differs: adapter: lora\(.*\) -> \(unset\)"):
        make(again, tmp_path / "other")


def test_freezing_adds_to_an_adapter(tmp_path: Path) -> None:
    job = make(adapter(tmp_path, freeze=["head", "encoder.blocks.0"]), tmp_path / "run")
    trained = {name for name, p in job.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("encoder.blocks.1.") and ".lora." in name for name in trained)


def test_an_adapter_needs_a_run(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter: .*train\.init_from"):
        io.override(recipe, ["model.adapter={rank=2}"])


def test_a_merged_run_does_the_same(tmp_path: Path) -> None:
    made = run(adapter(tmp_path), tmp_path / "run")
    other = merge(tmp_path / "run", tmp_path / "merged")
    assert other.config == made.config.model_copy(update={"adapter": None})
    texts = [text for text, _ in parities()]
    assert load(tmp_path / "merged").predict(texts) == made.predict(texts)
    found, again = (evaluate(tmp_path / name, split="valid").values for name in ("run", "merged"))
    assert again == pytest.approx(found, rel=1e-5)
    with pytest.raises(ConfigError, match="merged: has no adapter: there is nothing to merge"):
        merge(tmp_path / "merged", tmp_path / "twice")
    with pytest.raises(ConfigError, match="merged: exists already"):
        merge(tmp_path / "run", tmp_path / "merged")


def test_regression_begins_from_an_encoder(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Regress(), distances(), labels=1, types=2, steps=4)
    foreign(recipe, tmp_path / "first")
    spec = begun(recipe, tmp_path / "first", save_every=2)
    run(spec, tmp_path / "one")
    run(spec, tmp_path / "two")
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_rotary_angles_may_be_scaled(tmp_path: Path) -> None:
    """A run with another scaling of rotary angles starts from all weights of the first; another base is refused."""
    recipe = pairs(valid=None, steps=2)
    first = run(recipe, tmp_path / "first")
    recipe = begun(recipe, tmp_path / "first")
    position = Rotary(scaling=YarnScaling(factor=4.0, original_length=16))
    longer = make(_with_position(recipe, position), tmp_path / "longer").model
    before, after = values(first.model), values(longer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match=r"its model differs: decoder.position.theta"):
        make(_with_position(recipe, Rotary(theta=50.0)), tmp_path / "other")


def _with_position(recipe: Recipe, position: Rotary) -> Recipe:
    decoder = recipe.model.decoder
    assert decoder is not None
    model = recipe.model.model_copy(update={"decoder": decoder.model_copy(update={"position": position})})
    return recipe.model_copy(update={"model": model})
