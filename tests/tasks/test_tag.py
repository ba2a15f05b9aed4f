"""Tagging: where words are, the loss, the scores of spans and the predictions."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch.nn import functional as F

from anyformer.config import Attention, Block, ConfigError, ModelConfig, Stack, TokenLabels, Tokens
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import BPE, Bytes, Characters, Recipe, RunTokenizer, Tag, Unigram, WordPiece, Words
from anyformer.runs.run import Run, load
from anyformer.tasks import tag as tag_tasks
from anyformer.tasks.metrics import span_scores, spans
from anyformer.tasks.tag import TagTask, spell
from anyformer.training.plan import plan
from anyformer.training.train import evaluate
from tests.training.small import PACKED, PADDED, evens, make, pairs, quiet, run, said, settings, tagging

CRF = TokenLabels(labels=3, crf=True)
TEXTS = ["the quick brown fox's jumps", "나는 학교에 간다 .", "New York 12,5 % 我们"] * 3
RECIPES = {
    "softmax": lambda folder: tagging(folder, steps=2),
    "packed, smoothed": lambda folder: tagging(folder, batches=PACKED, label_smoothing=0.1, steps=2),
    "crf": lambda folder: tagging(folder, head=CRF, spelled=True, steps=2),
}


@pytest.fixture(scope="module", params=RECIPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Rows]:
    folder = tmp_path_factory.mktemp("trained")
    recipe = RECIPES[request.param](folder)
    valid = make(recipe, folder / "once").valid
    assert valid is not None
    made = run(recipe, folder / "run")
    texts = [words.replace("\n", " ") for words in valid.columns["words"]]
    own = [parameter.detach().clone() for parameter in made.model.parameters()]
    for seed in range(50):  # weights by which words differ
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, x in zip(made.model.parameters(), own, strict=True):
                parameter.copy_(x + torch.randn(x.shape, generator=generator) * 0.5)
        if len({*" ".join(made.predict(texts)).split(" ")}) > 1:
            break
    return made, valid


def tags_of(rows: Rows) -> list[list[str]]:
    return [tags.split("\n") for tags in rows.columns["tags"]]


# -- where words are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [BPE(size=300), Bytes(), Characters(), Unigram(size=330), WordPiece(size=200), Words()],
    ids=lambda s: s.kind,
)
def test_words_have_the_pieces_that_they_have_in_a_text(spec: Any) -> None:
    """And a label at the first of them."""
    tokenizer = train_tokenizer(spec, TEXTS)
    task = TagTask(Tag(labels=("a", "b")), tokenizer)
    config = tagger(vocab=tokenizer.size)
    sentences = [text.split(" ") for text in TEXTS]
    rows = Rows(
        {"words": ["\n".join(s) for s in sentences], "tags": ["\n".join("a" for _ in s) for s in sentences]},
        "x",
        range(9),
    )
    for text, words, piece in zip(TEXTS, sentences, task.encode(rows, config), strict=True):
        inner = tokenizer.encode(text)
        assert list(piece.ids) == [tokenizer.bos, *inner, tokenizer.eos]
        first = [i for i, label in enumerate(piece.labels) if label != IGNORE]
        assert len(piece.labels) == len(piece.ids)
        assert first[0] == 1
        cuts = [list(piece.ids[a:b]) for a, b in pairwise([*first, len(piece.ids) - 1])]
        assert len(cuts) == len(words)
        if spec.kind not in ("words", "wordpiece", "chars"):  # which have unknown ones
            assert [tokenizer.decode(cut).strip() for cut in cuts] == words


def tagger(**fields: Any) -> ModelConfig:
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    return ModelConfig(width=8, source=Tokens(**{"vocab": 11, **fields}), encoder=stack)


def without_marks(unk: bool) -> TextTokenizer:
    """A tokenizer that a word of a mark alone leaves no token of."""
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1} if unk else {"a": 0}, unk_token="[UNK]" if unk else "a"))
    inner.normalizer = normalizers.Replace("\u200b", "")
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(inner)


def test_a_word_without_tokens() -> None:
    """Is unknown; where there is nothing for such words, its sentence is a bad row."""
    rows = Rows({"words": ["a\n\u200b\na"], "tags": ["x\ny\nx"]}, "f", [7])
    config = tagger()
    task = TagTask(Tag(labels=("x", "y")), without_marks(unk=True))
    assert task.filter_rows(rows, config) == rows
    (piece,) = task.encode(rows, config)
    assert (list(piece.ids), list(piece.labels)) == ([0, 1, 0], [0, 1, 0])
    task = TagTask(Tag(labels=("x", "y")), without_marks(unk=False))
    (bad,) = task.filter_rows(rows, config).bad
    assert str(bad) == "f:7: word 2, '\\u200b': has no tokens, and the tokenizer has no <unk>"


@given(st.text(min_size=1, max_size=12), st.integers(1, 9))
def test_spelling(word: str, longest: int) -> None:
    raw, found = (
        [byte + 1 for byte in word.encode("utf-8", "replace")],
        spell(word.encode("utf-8", "replace").decode(), longest),
    )
    assert len(found) == min(len(raw), longest)
    half = (longest + 1) // 2
    assert found == (raw if len(raw) <= longest else raw[:half] + raw[len(raw) - longest // 2 :])
    assert 0 not in found


def test_each_token_is_spelled_as_its_word(trained: tuple[Run, Rows]) -> None:
    made, rows = trained
    assert isinstance(made.task, TagTask)
    spelled = made.config.source is not None and made.config.source.spelling.kind == "bytes"  # type: ignore[union-attr]
    for piece, words in zip(made.task.encode(rows, made.config), rows.columns["words"], strict=True):
        assert (piece.spelled is not None) == spelled
        if piece.spelled is None:
            continue
        word = -1
        assert not piece.spelled[0].any()
        assert not piece.spelled[-1].any()
        for label, letters in list(zip(piece.labels, piece.spelled, strict=True))[1:-1]:
            word += label != IGNORE
            assert bytes((letters[letters > 0] - 1).tolist()).decode() == words.split("\n")[word]


# -- what is lost, and what is said -----------------------------------------------------------------------------------


def test_evaluation_is_what_it_is_by_hand(trained: tuple[Run, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = trained
    task, asked, labels = made.task, tags_of(rows), made.spec.labels  # type: ignore[union-attr]
    assert isinstance(task, TagTask)
    monkeypatch.setattr(tag_tasks, "MAX_INFERENCE_TOKENS", 60)  # several batches
    found, total, guesses = task.evaluate(made.model, rows, PADDED), 0.0, []
    for piece in task.encode(rows, made.config):
        spelled = None if piece.spelled is None else torch.from_numpy(piece.spelled.astype("int64"))[None]
        with torch.no_grad():
            out = made.model(torch.tensor([list(piece.ids)]), spelled=spelled)
        at, numbers = torch.tensor(piece.labels) != IGNORE, torch.tensor([n for n in piece.labels if n != IGNORE])
        if out.dim() == 3:
            total += float(F.cross_entropy(out[0, at], numbers, reduction="sum"))
            guesses.append([labels[i] for i in out[0, at].argmax(-1).tolist()])
        else:
            total += float(task.loss(out, torch.tensor([piece.labels])))
            guesses += task.best(out, torch.tensor([piece.labels]))
    assert made.predict([words.replace("\n", " ") for words in rows.columns["words"]]) == list(map(" ".join, guesses))
    words = sum(map(len, asked))
    right = sum(a == b for x, y in zip(guesses, asked, strict=True) for a, b in zip(x, y, strict=True))
    assert found.notes["words"] == words
    assert found.count == len(rows)
    assert found.values["loss"] == pytest.approx(total / words, rel=1e-4)
    assert found.values["accuracy"] == pytest.approx(right / words)
    assert found.values["span_f1"] == pytest.approx(span_scores(guesses, asked)[0]["span_f1"])
    assert len({tag for row in guesses for tag in row}) > 1


def test_a_training_step_loses_what_evaluation_counts(trained: tuple[Run, Rows]) -> None:
    """Packed, too; and rows of a process that has none left lose nothing."""
    made, rows = trained
    for batches in [PADDED] if made.config.head == CRF else [PADDED, PACKED]:
        wide = batches.model_copy(update={"tokens": 10_000})
        batch, _ = made.task.loader(rows, wide, 0, made.model).read(Cursor())
        assert len(batch.examples) == len(rows)
        with torch.no_grad():
            logits = made.model(batch.ids, segments=batch.segments, spelled=batch.spelled)
        wanted = made.task.evaluate(made.model, rows, PADDED).values["loss"]
        assert float(made.task.loss(logits, batch.labels)) / batch.target_count == pytest.approx(wanted, rel=1e-4)
        assert float(made.task.loss(logits, torch.full_like(batch.labels, IGNORE))) == 0


def test_answers_come_in_the_order_and_form_asked(trained: tuple[Run, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = trained
    asked = [words.replace("\n", "\t" if i % 2 else " ") for i, words in enumerate(rows.columns["words"][:20])]
    asked[3:3] = ["", " \t ", "unseen words"]
    one_by_one = [made.predict([text])[0] for text in asked]
    monkeypatch.setattr(tag_tasks, "MAX_INFERENCE_TOKENS", 40)
    done: list[int] = []
    assert made.predict(asked, progress=done.append) == one_by_one
    assert sum(done) == len(asked)
    assert one_by_one[3:5] == ["", ""]
    for text, answer in zip(asked, one_by_one, strict=True):
        apart = "\t" if "\t" in text else " "
        assert len(answer.split(apart)) == len(text.split(apart)) or not text.strip()
    assert made.predict(["1 2", "1\t2"])[0].split(" ") == made.predict(["1\t2"])[0].split("\t")
    assert made.predict(["12  7 "]) == made.predict(["12 7"])
    with pytest.raises(ConfigError, match="text 2: word 2 is empty"):
        made.predict(["1", "1\t\t2"])
    with pytest.raises(ConfigError, match="beams: is for models that generate text"):
        made.predict(["1"], beams=2)


def test_a_run_keeps_its_labels(trained: tuple[Run, Rows]) -> None:
    made, _ = trained
    kept = load(made.folder)
    assert kept.spec == made.task.spec == Tag(labels=("B-even", "I-even", "O"), spans=True)
    assert evaluate(made.folder, split="valid").values["span_f1"] >= 0


def test_a_crf_learns_what_follows_what(tmp_path: Path) -> None:
    """Words say nothing here: the tag is told by the one before alone."""
    chance = random.Random(1)
    begun = [[("x", "abc"[(start + i) % 3]) for i in range(4)] for start in (chance.randint(0, 2) for _ in range(40))]
    recipe = tagging(tmp_path, rows=begun, head=CRF, tokenizer=Words(), steps=80)
    made = run(recipe, tmp_path / "run")
    assert made.predict(["x x x x"])[0].replace(" ", "") in ("abca", "bcab", "cabc")
    matrix = made.model.head.transitions.detach()
    assert matrix[:-1].argmax(dim=1).tolist() == [1, 2, 0]


def test_it_learns(tmp_path: Path) -> None:
    recipe = tagging(tmp_path, rows=evens(60), tokenizer=Words(size=30), spelled=True, width=16, steps=120)
    made = run(recipe, tmp_path / "run")  # most words are unknown, and told by their letters
    assert evaluate(made.folder, split="valid").values["span_f1"] > 0.8


# -- scores -----------------------------------------------------------------------------------------------------------

LABELS = ["O", "O", "B-x", "I-x", "B-y", "I-y", "B-y-z", "I-y-z"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("labels", [LABELS, [*LABELS, "E-x", "S-x", "E-y", "S-y"]], ids=["iob", "iobes"])
@given(data=st.data())
def test_spans_are_those_of_seqeval(labels: list[str], data: st.DataObject) -> None:
    """However malformed."""
    theirs = pytest.importorskip("seqeval.metrics")
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    said, asked = ([[data.draw(st.sampled_from(labels)) for _ in range(n)] for n in lengths] for _ in range(2))
    found, each = span_scores(said, asked)
    assert found["span_precision"] == pytest.approx(theirs.precision_score(asked, said))
    assert found["span_recall"] == pytest.approx(theirs.recall_score(asked, said))
    assert found["span_f1"] == pytest.approx(theirs.f1_score(asked, said))
    assert list(each.values()) == pytest.approx(list(theirs.f1_score(asked, said, average=None)))


def test_spans_by_hand() -> None:
    assert spans(["B-x", "I-x", "O", "I-y", "I-x", "B-x"]) == {("x", 0, 2), ("y", 3, 4), ("x", 4, 5), ("x", 5, 6)}


def completed(task: Tag, tags: list[str]) -> Tag:
    return task.complete(Rows({"tags": tags}, "f", range(len(tags))))


def test_labels_tell_whether_there_are_spans() -> None:
    assert completed(Tag(), ["O\nB-x\nI-x"]) == Tag(labels=("B-x", "I-x", "O"), spans=True)
    assert completed(Tag(), ["B-x\nNOUN"]).spans is False
    assert completed(Tag(spans=False), ["B-x\nO"]).spans is False
    assert completed(Tag(labels=("O", "S-x"), spans=True), []).spans is True
    with pytest.raises(ConfigError, match=r"task\.spans = true: 'NOUN' is not a label of spans"):
        completed(Tag(spans=True), ["O\nNOUN"])
    with pytest.raises(ConfigError, match="has fewer than two tags: of the words of all rows, all have the tag 'O'"):
        completed(Tag(), ["O\nO"])
    with pytest.raises(ConfigError, match="'O' occurs twice"):
        Tag(labels=("O", "O"))


# -- another run's body -----------------------------------------------------------------------------------------------


def begun(recipe: Recipe, first: Path) -> Recipe:
    train = {**dict(recipe.train), "init_from": str(first)}
    return recipe.model_copy(update={"tokenizer": RunTokenizer(), "train": settings(**train)})


def test_a_new_head_on_an_old_body(tmp_path: Path) -> None:
    """Of a model that wrote; and a head goes on that says the same labels."""
    first = run(pairs("decoder", steps=2), tmp_path / "first")
    model = pairs("decoder").model.model_copy(update={"head": CRF})
    recipe = tagging(tmp_path, steps=2).model_copy(update={"model": model})
    job = make(begun(recipe, tmp_path / "first"), tmp_path / "run", console=(console := quiet()))
    own, given = job.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(own[name], given[name]) for name in own if not name.startswith("head"))
    assert "head.transitions, head.linear.weight, head.linear.bias" in said(console)
    second = run(begun(recipe, tmp_path / "first"), tmp_path / "second")
    again = make(begun(recipe, tmp_path / "second"), tmp_path / "again", console=(console := quiet()))
    assert ", to be trained: " not in said(console)
    assert torch.equal(again.model.head.transitions, second.model.head.transitions)
    other = [[(word, tag.lower()) for word, tag in row] for row in evens()]
    renamed = tagging(tmp_path, rows=other).model_copy(update={"model": model})
    make(begun(renamed, tmp_path / "second"), tmp_path / "renamed", console=(console := quiet()))
    assert ", to be trained: " in said(console)


# -- bad input: one line each -----------------------------------------------------------------------------------------


def test_the_plan_names_tags(tmp_path: Path) -> None:
    found = plan(tagging(tmp_path, head=CRF, spelled=True))
    assert {word for example in found.examples for word in example.labels.split()} <= {"O", "B-even", "I-even"}
