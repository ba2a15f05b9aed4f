"""Models trained here run in `transformers` and say the same there; where no public form is, the field is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.runs.run import Run
from tests.interop.public import again
from tests.test_cli import done, refused

LINES = [f"{who} {what} the {thing}" for who in ("we", "they") for what in ("see", "hear") for thing in ("sea", "owl")]
GATES = 'model.decoder.blocks.*.feedforward={kind="gated"}'
HALVES = ("model.encoder.position.layout=halves", "model.decoder.position.layout=halves")


def trained(recipe: str, folder: Path, *changes: str, out: str = "run") -> Run:
    """By a recipe as it is, but for its size, on a few lines."""
    for name in ("tinyshakespeare/input.txt", *(f"multi30k/tok/{part}" for part in PARTS)):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in LINES * 40))
    small = [f"data.root={folder / 'data'}", "train.steps=30", "train.evaluate_every=30", "train.schedule.warmup=5"]
    return af.train(recipe, folder / out, [*small, *changes])


PARTS = [f"{split}.lc.norm.tok.{side}" for split in ("train", "val", "test_2016_flickr") for side in ("en", "de")]
DECODER = ("model.width=32", "model.decoder.depth=2", "batches.length=24")
PAIR = (
    *("model.width=32", "model.encoder.depth=1", "model.decoder.depth=2", "tokenizer.size=290", "task.metrics=[]"),
    *("train.average=1", "train.keep=1", "train.save_every=30", "batches.tokens=256"),
)


@torch.no_grad()
def close(run: Run, model: hf.PreTrainedModel, **ids: Any) -> None:
    found = run.model(*ids.values())
    torch.testing.assert_close(found, model(**ids, use_cache=False).logits, atol=1e-4, rtol=0)


def test_shakespeare(tmp_path: Path) -> None:
    run = trained("shakespeare", tmp_path, *DECODER, GATES)
    model = again(run, tmp_path / "public", hf.AutoModelForCausalLM)
    assert model.config.model_type == "llama"
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "public")
    for prompt in ("we see", "they h", "o"):
        ids = tokens(prompt, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == run.tokenizer.encode(prompt)
        close(run, model, input_ids=ids)
        made = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        assert run.generate([prompt], max_new_tokens=16) == [run.tokenizer.decode(made.tolist())]


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    first = trained("shakespeare", tmp_path, *DECODER, GATES)
    changes = (f"train.init_from={tmp_path / 'run'}", "model.adapter={rank=4}", "train.steps=10")
    run = trained("shakespeare", tmp_path, *DECODER, GATES, *changes, out="adapted")
    model = again(run, tmp_path / "public", hf.AutoModelForCausalLM)
    ids = torch.tensor([run.tokenizer.encode("we see the owl")])
    close(run, model, input_ids=ids)
    assert not torch.allclose(run.model(ids), first.model(ids), atol=1e-2)


def test_multi30k(tmp_path: Path) -> None:
    run = trained("multi30k-en-de", tmp_path, *PAIR, *HALVES)
    model = again(run, tmp_path / "public", hf.AutoModelForSeq2SeqLM)
    assert model.config.model_type == "pegasus"
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "public")
    for text in (LINES[0], LINES[5], "owl see"):
        ids = tokens(text, return_tensors="pt")["input_ids"]
        close(run, model, input_ids=ids, decoder_input_ids=ids.flip(1))
        made = model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=1)
        assert run.generate([text], max_new_tokens=12) == [run.tokenizer.decode(made[0].tolist())]


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("shakespeare", DECODER, "decoder.blocks.0.feedforward = 'plain': must be gated"),
        ("multi30k-en-de", PAIR, "encoder.position.layout = 'interleaved': "),
    ],
)
def test_the_field_is_named(recipe: str, changes: tuple[str, ...], said: str, tmp_path: Path) -> None:
    trained(recipe, tmp_path, *changes, "train.steps=1")
    lines = refused("export", tmp_path / "run", tmp_path / "public")
    assert lines[0].startswith(said)
    assert all("is nearest)" in line for line in lines)
    assert not (tmp_path / "public").exists()


def test_what_was_imported_begins_a_training(tmp_path: Path) -> None:
    """There and back, then on: `train.init_from` takes an imported run."""
    whole = (  # an imported config says all of it
        'model.decoder.blocks.*.feedforward={kind="gated", width=80}',
        "model.decoder.blocks.*.mixer={heads=4, kv_heads=4, key_width=8}",
        "model.context=2048",
    )
    trained("shakespeare", tmp_path, *DECODER, *whole)
    assert "as llama" in done("export", tmp_path / "run", tmp_path / "public")
    assert "imported" in done("import", tmp_path / "public", "--out", tmp_path / "back")
    begin = (f"train.init_from={tmp_path / 'back'}", "train.steps=1", "train.optimizer.lr=1e-9")
    more = trained("shakespeare", tmp_path, *DECODER, *whole, *begin, out="more").model.state_dict()
    first = af.load(tmp_path / "run").model.state_dict()
    assert all(torch.allclose(first[name], more[name], atol=1e-6, rtol=0) for name in first)
