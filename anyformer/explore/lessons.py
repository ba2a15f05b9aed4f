"""Lessons in TOML files: the page poses a question, the student clicks, and the model answers.

Right answers are not in a file: they are computed from the open run, so that a lesson holds for every run that has the
shape and gives the answer that it names. A step is about one token of that answer, whose probability is p. Candidates:

    head   each head switched off: right is the one with the lowest p, if that is below half of the model's
    token  each word of the text left out: likewise
    step   each saved step of the training: right is the first with p above one half

A control decides whether a question has an answer at all: p with all heads off, so that no token reads another. A
question about an output that survives this is refused, because no head and no word of the text causes it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from anyformer.config import ConfigError, Fault, io
from anyformer.config.spec import Count, Spec, did_you_mean
from anyformer.explore.head_values import EffectRequest, EffectsView
from anyformer.explore.open_runs import Workspace
from anyformer.explore.outputs import has_probabilities, output_names, position, separate_labels, values_at
from anyformer.explore.requests import LessonRequest, RunRequest, TextRequest
from anyformer.explore.trace import Trace, passes_allowed

TIE = 0.05  # candidates whose p is this close to the lowest are right, too


Text = Annotated[str, Field(min_length=1)]


class Wording(Spec):
    """A text in both languages of the page."""

    en: Text
    ko: Text


class Question(Spec):
    """A question whose answer is a head, a word of the text or a step of the training; `then` follows the answer."""

    find: Literal["head", "token", "step"]
    text: Wording
    then: Wording


class Shown(Spec):
    """The view that a step opens, and its state; `stage` is one of the path, such as `decoder.softmax`."""

    name: Literal[
        "path",
        "heads",
        "model",
        "matrix",
        "neuron",
        "next",
        "lens",
        "surprise",
        "salience",
        "patch",
        "block",
        "cache",
        "live",
    ]
    layer: Count | None = None
    head: Count | None = None
    stage: Text | None = None


class LessonStep(Spec):
    """A text, a view and perhaps a question, about one token of the answer, from 0."""

    text: Wording
    view: Shown
    output: Count = 0
    question: Question | None = None


class Lesson(Spec):
    """Steps about one text and the answer that a run must give to it."""

    title: Wording
    shape: Literal["encoder", "decoder", "encoder-decoder"]
    text: Text
    answer: Text
    steps: Annotated[tuple[LessonStep, ...], Field(min_length=1)]


Lessons = dict[str, Lesson]


def shipped_lessons() -> Lessons:
    """Return the lessons of the package by name."""
    folder = resources.files("anyformer.explore") / "lesson_files"
    files = sorted(Path(str(file)) for file in folder.iterdir() if file.name.endswith(".toml"))
    return {file.stem: io.load(Lesson, file) for file in files}


class Candidate(NamedTuple):
    """A possible answer to a question, the probability with it, and the change of the page's state that shows it."""

    name: str
    p: float
    change: dict[str, Any]


def read_lessons(paths: Sequence[Path], workspace: Workspace) -> Lessons:
    """Return the lessons of files, then those of the package. Raise if no open run fits one of the files."""
    shipped = shipped_lessons()
    own = Lessons()
    for path in paths:
        lesson = io.load(Lesson, path)
        if path.stem in own or path.stem in shipped:
            raise ConfigError([Fault(str(path), f"there is another lesson '{path.stem}': rename the file")])
        found = [OpenLesson(workspace, run, lesson) for run in workspace.runs]
        with io.faults_in(path):
            reasons = [one.why for one in found]
            if None in reasons:
                found[reasons.index(None)].places()
        if None not in reasons:
            raise ConfigError([Fault(str(path), f"no open run fits: {'; '.join(why for why in reasons if why)}")])
        own[path.stem] = lesson
    return own | shipped


def list_lessons(workspace: Workspace, lessons: Lessons, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all lessons as plain values, with the position of each step, or the reason why a run does not fit."""
    request = RunRequest(**fields)
    listed = []
    with workspace.lock:
        for name, lesson in lessons.items():
            one = OpenLesson(workspace, request.run, lesson)
            places = [] if one.why else one.places()
            listed.append({"name": name, "why": one.why, "places": places, **lesson.model_dump()})
    return listed


def judge(workspace: Workspace, lessons: Lessons, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the candidates of a question with their probabilities, and the indices of the right ones, if any is."""
    request = LessonRequest(**fields)
    if request.lesson not in lessons:
        raise ConfigError([Fault("lesson", f"= '{request.lesson}': {did_you_mean(request.lesson, lessons)}")])
    with workspace.lock:
        return OpenLesson(workspace, request.run, lessons[request.lesson]).judge(request.step)


@dataclass(frozen=True)
class OpenLesson:
    """A lesson with the run that answers it."""

    workspace: Workspace
    run: str
    lesson: Lesson

    @property
    def why(self) -> str | None:
        """The reason why the run does not fit the lesson, if it does not."""
        run, lesson = self.workspace.opened(self.run).run, self.lesson
        if run.config.shape != lesson.shape:
            return f"the shape of {self.run} is {run.config.shape}, that of the lesson {lesson.shape}"
        if not has_probabilities(run):
            return f"the head of {self.run} gives no probabilities of tokens or labels"
        try:
            answer = self.workspace.answer("answer", {"run": self.run, "text": lesson.text})["answer"]
        except ConfigError as error:
            return "; ".join(str(error).splitlines())
        if answer != lesson.answer:
            return f"{self.run} answers '{lesson.text}' with '{answer}', and the lesson needs '{lesson.answer}'"
        if separate_labels(self._trace()):
            return f"{self.run} decides each label by itself"
        return next((why for i, step in enumerate(lesson.steps) if step.question and (why := self._survival(i))), None)

    def _survival(self, index: int) -> str | None:
        """Return why the question of a step has no answer: its output stays with all heads off."""
        trace = self._trace()
        output, before = self._output(trace, index)
        control = self._control(index, output)
        if control is None or control < before / 2:
            return None
        name = output_names(trace)(output)
        return (
            f"steps.{index}.question: with all heads off {self.run} still gives '{name}' a probability of "
            f"{control:.2f} (with all on {before:.2f}), so no head and no word causes it: choose another text"
        )

    def places(self) -> list[int]:
        """Return the position that each step is about."""
        trace = self._trace()
        return [self._place(trace, i) for i in range(len(self.lesson.steps))]

    def judge(self, index: int) -> dict[str, Any]:
        """Return the answer of the model to the question of a step."""
        question = self.lesson.steps[index].question if index < len(self.lesson.steps) else None
        if question is None:
            raise ConfigError([Fault("step", f"= {index}: the lesson has no question there")])
        if self.why:
            raise ConfigError([Fault("run", self.why)])
        trace = self._trace()
        output, before = self._output(trace, index)
        match question.find:
            case "head":
                candidates = list(self._heads(index, output, before))
            case "token":
                candidates = list(self._words(index, output))
            case "step":
                candidates = list(self._steps(index, output))
        values = [one.p for one in candidates]
        if question.find == "step":
            right = [i for i, p in enumerate(values) if p > 0.5][:1]
        else:
            right = [i for i, p in enumerate(values) if p < before / 2 and p <= min(values) + TIE]
        return {
            "output": output_names(trace)(output),
            "before": before,
            "control": self._control(index, output),
            "candidates": [one._asdict() for one in candidates],
            "right": right,
        }

    def _trace(self, **changes: Any) -> Trace:
        target = None if self.lesson.shape == "encoder" else self.lesson.answer
        request = {"run": self.run, "text": self.lesson.text, "target": target} | changes
        return self.workspace.trace(TextRequest(**request))

    def _place(self, trace: Trace, index: int) -> int:
        """Return the position whose output a step is about."""
        begins, wanted = trace.reading.begins, self.lesson.steps[index].output
        if begins is None:
            return position(trace, -1)
        count = len(trace.reading.tokens["decoder"]) - begins + 1  # with the end
        if wanted >= count:
            why = f"= {wanted}: the answer '{self.lesson.answer}' has {count} tokens with its end, from 0"
            raise ConfigError([Fault(f"steps.{index}.output", why)])
        return begins - 1 + wanted

    def _output(self, trace: Trace, index: int) -> tuple[int, float]:
        """Return the output that a step is about, and its probability."""
        output = int(values_at(trace, self._place(trace, index)).argmax())
        return output, self._probability(trace, index, output)

    def _control(self, index: int, output: int) -> float | None:
        """Return the probability with all heads off; None where words act without heads, too.

        That is where tokens read each other by other mixers, and where an encoder's head pools words by itself.
        """
        trace, question = self._trace(), self.lesson.steps[index].question
        if self.lesson.shape == "encoder" and question is not None and question.find != "head":
            return None
        blocks = [block for stack in trace.run.config.stacks.values() for block in stack.unrolled()]
        if not all(block.attention for block in blocks):
            return None
        return self._probability(self._trace(off=list(trace.heads)), index, output)

    def _probability(self, trace: Trace, index: int, output: int) -> float:
        return float(values_at(trace, self._place(trace, index)).double().softmax(dim=-1)[output])

    def _heads(self, index: int, output: int, before: float) -> Iterator[Candidate]:
        trace = self._trace()
        request = EffectRequest(run=self.run, text=self.lesson.text, at=self._place(trace, index), output=output)
        for name, change in EffectsView().answer(trace, request)["heads"].items():
            p = 0.0 if change is None else before * math.exp(change)  # None: the logarithm of 0
            yield Candidate(name, p, {"off": [name]})

    def _words(self, index: int, output: int) -> Iterator[Candidate]:
        words, most = self.lesson.text.split(), passes_allowed(self._trace())
        if len(words) > most:
            raise ConfigError(
                [Fault("text", f"{len(words)} words take one pass each, and {most} passes are allowed: shorten it")]
            )
        for i, word in enumerate(words):
            text = " ".join(words[:i] + words[i + 1 :])
            trace = self._trace(text=text)
            at = self._place(trace, index)
            yield Candidate(word, self._probability(trace, index, output), {"text": text, "at": at, "query": at})

    def _steps(self, index: int, output: int) -> Iterator[Candidate]:
        steps = self.workspace.opened(self.run).about()["steps"]
        if len(steps) < 2:
            raise ConfigError([Fault("run", f"{self.run} has no saved steps: train it with train.snapshots")])
        for step in steps:
            yield Candidate(str(step), self._probability(self._trace(step=step), index, output), {"step": step})
