"""Lessons: strict files, and right answers that are computed from the run and agree with the model called directly."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.config.part import kind_of
from anyformer.explore.lessons import Lesson, Shown, judge, list_lessons, read_lessons, shipped_lessons
from anyformer.explore.open_runs import BUNDLED, OpenRun, Workspace, open_runs
from anyformer.explore.trace import parse_heads
from anyformer.explore.view import View
from anyformer.nn.inspection.ablation import disable_heads
from anyformer.nn.inspection.sublayers import attentions
from tests.explore import made
from tests.test_cli import run as command

GOOD = io.dumps(shipped_lessons()["2-heads"])


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return open_runs([BUNDLED])


def questions() -> list[tuple[str, int]]:
    return [
        (name, i) for name, lesson in shipped_lessons().items() for i, one in enumerate(lesson.steps) if one.question
    ]


def asked(workspace: Workspace, name: str, step: int, **more: Any) -> dict[str, Any]:
    return judge(workspace, shipped_lessons() | more, {"run": "sort", "lesson": name, "step": step})


def test_three_lessons_fit_the_bundled_run(workspace: Workspace) -> None:
    listed = list_lessons(workspace, shipped_lessons(), {"run": "sort"})
    assert len(listed) == 3
    assert [one["why"] for one in listed] == [None] * 3
    assert all(len(one["places"]) == len(one["steps"]) for one in listed)


@pytest.mark.parametrize(("name", "step"), questions())
def test_each_question_has_one_clear_answer(workspace: Workspace, name: str, step: int) -> None:
    """One candidate is right and far from the others, or none is and all leave the output as it is."""
    found = asked(workspace, name, step)
    p = [one["p"] for one in found["candidates"]]
    assert found["before"] > 0.95
    assert len(found["right"]) <= 1
    if found["candidates"][0]["change"].keys() == {"step"}:
        (right,) = found["right"]
        assert p[right] > 0.55 > 0.4 > max(p[:right])
    else:
        others = [value for i, value in enumerate(p) if i not in found["right"]]
        assert min(others) > 0.95
        assert all(p[i] < 0.4 for i in found["right"])


@pytest.mark.parametrize(("name", "step"), questions())
def test_the_answer_of_each_question_is_gone_with_everything_off(workspace: Workspace, name: str, step: int) -> None:
    """With no head at all, no token reads another: no head, word or training causes an output that stays."""
    lesson, run = shipped_lessons()[name], workspace.opened("sort").run
    ids = [*run.tokenizer.encode(lesson.text), run.tokenizer.sep, *run.tokenizer.encode(lesson.answer)]
    at = ids.index(run.tokenizer.sep) + lesson.steps[step].output
    every = {layer: list(range(attention.heads)) for layer, attention in attentions(run.model).items()}
    with torch.no_grad(), disable_heads(run.model, every):
        p = run.model(torch.tensor([ids])).float()[0, at].softmax(dim=-1)[ids[at + 1]]
    found = asked(workspace, name, step)
    assert found["control"] == pytest.approx(float(p), abs=1e-5)
    assert p < 0.1 < found["before"] / 2


def right(workspace: Workspace, name: str, step: int, **more: Any) -> list[str]:
    found = asked(workspace, name, step, **more)
    return [found["candidates"][i]["name"] for i in found["right"]]


def test_what_the_lessons_conclude_is_what_the_run_does(workspace: Workspace) -> None:
    """The sentences after an answer are fixed: each one is checked against the run."""
    lessons = shipped_lessons()
    assert right(workspace, "1-input", 1) == ["5"]  # "only without the 5 does it write something else"
    assert right(workspace, "1-input", 2) == []  # "there are two 3s in the text, and one is enough"
    heads = [right(workspace, "2-heads", step) for step in (1, 2, 3)]
    assert [len(one) for one in heads[:2]] == [1, 1]
    assert heads[0] != heads[1]  # "in this text another head does it"
    assert heads[2] == []  # "where no single head is needed, several do the same work"
    other = lessons["2-heads"].model_copy(update={"text": "4 0 5", "answer": "0 4 5"})
    assert [right(workspace, "other", step, other=other) for step in (1, 2)] != heads[:2]  # "try 4 0 5"
    found, counted = (int(right(workspace, "3-training", step)[0]) for step in (1, 2))
    assert found < counted  # "counting is learnt later than finding"
    between = [step for step in workspace.opened("sort").about()["steps"] if found <= step < counted]
    text = lessons["3-training"].text
    for step in between:  # "until then, the model leaves repeated digits out"
        answer = workspace.answer("answer", {"run": "sort", "text": text, "step": step})["answer"]
        assert answer == " ".join(sorted({*text.split()}))


def test_a_question_that_survives_everything_off_is_refused(workspace: Workspace) -> None:
    """The run writes 1 after the separator whatever it has read, so no head and no word can be right."""
    fields = {"text": "3 1 2", "answer": "1 2 3"}
    lesson = shipped_lessons()["2-heads"].model_copy(update=fields)
    (listed,) = list_lessons(workspace, {"own": lesson}, {"run": "sort"})
    assert "steps.1.question: with all heads off sort still gives '1' a probability of 1.00" in listed["why"]
    with pytest.raises(ConfigError, match="choose another text"):
        asked(workspace, "own", 1, own=lesson)


def test_heads_are_judged_by_the_model_without_them(workspace: Workspace) -> None:
    lesson, run = shipped_lessons()["2-heads"], workspace.opened("sort").run
    ids = [*run.tokenizer.encode(lesson.text), run.tokenizer.sep, *run.tokenizer.encode(lesson.answer)]
    at = ids.index(run.tokenizer.sep)
    id = ids[at + 1]
    found = asked(workspace, "2-heads", 1)
    for one in found["candidates"]:
        with torch.no_grad(), disable_heads(run.model, parse_heads(run.model, one["change"]["off"])):
            p = run.model(torch.tensor([ids])).float()[0, at].softmax(dim=-1)[id]
        assert one["p"] == pytest.approx(float(p), abs=1e-5)
    assert found["right"] == [min(range(8), key=lambda i: found["candidates"][i]["p"])]


@pytest.mark.parametrize(("name", "field"), [("1-input", "text"), ("3-training", "step")])
def test_texts_and_steps_are_judged_as_the_page_shows_them(workspace: Workspace, name: str, field: str) -> None:
    lesson, found = shipped_lessons()[name], asked(workspace, name, 1)
    for one in found["candidates"]:
        body = {"run": "sort", "text": lesson.text, "target": lesson.answer, field: one["change"][field]}
        at = one["change"].get("at", list_lessons(workspace, shipped_lessons(), {"run": "sort"})[2]["places"][1])
        shown = workspace.answer("next", body | {"at": at})
        logits = torch.tensor([value for _, value in shown["logits"]], dtype=torch.float64)  # the whole vocabulary
        index = [token for token, _ in shown["logits"]].index(found["output"])
        assert one["p"] == pytest.approx(float(logits.softmax(0)[index]), abs=1e-5)


def test_another_run_does_not_fit(tmp_path: Path) -> None:
    runs = {name: OpenRun(name, made.made(name), tmp_path / name) for name in ("sort", "pair", "embed")}
    for name, why in (("sort", "and the lesson needs '3 3 5 7 7 8'"), ("pair", "that of the lesson decoder")):
        listed = list_lessons(Workspace(runs), shipped_lessons(), {"run": name})
        assert why in listed[0]["why"]
        assert listed[0]["places"] == []
    with pytest.raises(ConfigError, match="the lesson needs"):
        judge(Workspace(runs), shipped_lessons(), {"run": "sort", "lesson": "1-input", "step": 1})


def test_a_lesson_of_a_classifier(tmp_path: Path) -> None:
    workspace = Workspace({"classify": OpenRun("classify", made.made("classify"), tmp_path)})
    answer = workspace.answer("answer", {"run": "classify", "text": "the lazy dog"})["answer"]
    step = shipped_lessons()["1-input"].steps[1].model_copy(update={"output": 0})
    fields = {"shape": "encoder", "text": "the lazy dog", "answer": answer, "steps": (step,)}
    lesson = shipped_lessons()["2-heads"].model_copy(update=fields)
    found = judge(workspace, {"own": lesson}, {"run": "classify", "lesson": "own", "step": 0})
    assert found["output"] == answer
    assert len(found["candidates"]) == 3
    assert found["control"] is None  # a mean of words differs with the words, also without heads
    assert all(0 <= one["p"] <= 1 for one in found["candidates"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("answer =", "anwser ="), "anwser: unknown.*did you mean 'answer'"),
        (('find = "head"', 'find = "heads"'), "steps.1.question.find"),
        (('name = "model"', 'name = "models"'), "steps.0.view.name"),
        (("ko =", "kr ="), "kr"),
        (("output = 2", "output = 9"), "steps.3.output = 9: the answer '0 1 2' has 4 tokens with its end"),
        (('answer = "0 1 2"', 'answer = "2 1 0"'), "no open run fits: sort answers '1 0 2' with '0 1 2'"),
        (
            ('text = "1 0 2"\nanswer = "0 1 2"', 'text = "3 1 2"\nanswer = "1 2 3"'),
            "steps.1.question: with all heads off sort",
        ),
        (("layer = 0", "layer = -1"), "steps.1.view.layer"),
        (('title]\nen = "Which head does the work?"', 'title]\nen = ""'), "title.en"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = tmp_path / "mine.toml"
    assert change[0] in GOOD
    file.write_text(GOOD.replace(*change), encoding="utf-8")
    result = command("explore", "--lesson", str(file), "--port", "0", "--no-browser")
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split()))
    assert "mine.toml" in "".join(result.output.split())


def test_own_lessons_come_first_and_names_are_unique(tmp_path: Path, workspace: Workspace) -> None:
    for name in ("mine", "2-heads"):
        (tmp_path / f"{name}.toml").write_text(GOOD, encoding="utf-8")
    assert list(read_lessons([tmp_path / "mine.toml"], workspace)) == ["mine", *shipped_lessons()]
    with pytest.raises(ConfigError, match="another lesson '2-heads': rename the file"):
        read_lessons([tmp_path / "2-heads.toml"], workspace)


def test_a_question_that_is_not_there(workspace: Workspace) -> None:
    for name, step, message in (
        ("2-heads", 0, "no question"),
        ("2-heads", 9, "no question"),
        ("2-head", 1, "did you mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            asked(workspace, name, step)


def test_a_file_is_written_as_it_is_read() -> None:
    for lesson in shipped_lessons().values():
        assert io.loads(Lesson, io.dumps(lesson)) == lesson


def test_the_views_of_a_lesson_are_the_tabs_of_the_page() -> None:
    ours = [view for view in View.choices() if view.__module__.startswith("anyformer.")]
    tabs = {kind_of(view) for view in ours if view.group is not None}
    assert set(get_args(Shown.model_fields["name"].annotation)) == tabs


def test_the_lesson_of_the_docs(tmp_path: Path, workspace: Workspace) -> None:
    text = (Path(__file__).parents[2] / "docs/explore.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    mine = read_lessons([tmp_path / "mine.toml"], workspace)["mine"]
    found = judge(workspace, {"mine": mine}, {"run": "sort", "lesson": "mine", "step": 0})
    assert len(found["right"]) == 1
