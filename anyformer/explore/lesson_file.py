"""The file of a lesson: texts in both languages, views and questions, without their right answers (`lessons.py`)."""

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import io
from anyformer.config.spec import Count, Spec

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
