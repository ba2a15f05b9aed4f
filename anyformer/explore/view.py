"""Views of the page: which runs have them, their requests and their answers.

A view is a part: one class says all of it, and the page shows its tab. `page/*.js` draws the answers of ours; that of
another view is shown entry by entry: a text or a number as it is, a list of numbers as bars, a list of rows
`{column: value}` as a table, and a picture by `png`.
"""

from abc import abstractmethod
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from anyformer.config import ConfigError
from anyformer.config.part import Part
from anyformer.explore.requests import RunRequest, TextRequest
from anyformer.explore.trace import MAX_PASSES, Trace, passes_allowed
from anyformer.runs.run import Run

GROUPS = ("start", "attention", "prediction", "build", "runs")  # of tabs, in their order
Answer = dict[str, Any] | Iterator[dict[str, Any]]  # plain values, or a stream of lines


@dataclass(frozen=True)
class SavedText:
    """A text whose answers are saved, with the requests of views about it."""

    workspace: Any  # the open runs
    body: dict[str, Any]  # run, text, target and disabled heads

    def request(self, view: "View", fields: dict[str, Any]) -> dict[str, Any]:
        """Return a request about the text; some views are about its run alone."""
        return {name: value for name, value in self.body.items() if name in view.request.model_fields} | fields

    def ask(self, view: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return an answer about the text; raise `ConfigError` if there is none."""
        return dict(self.workspace.answer(view, {**self.body, **fields}))

    @cached_property
    def about(self) -> dict[str, Any]:
        return self.workspace.opened(self.body["run"]).about()

    @cached_property
    def reading(self) -> dict[str, Any]:
        return self.ask("read", {})

    @cached_property
    def outline(self) -> dict[str, Any]:
        return self.ask("path", {})

    @cached_property
    def lens(self) -> dict[str, Any] | None:
        """The first page of the view `lens`, if the run has it."""
        try:
            return self.ask("lens", {"first": 0})
        except ConfigError:
            return None

    @property
    def side(self) -> str:
        """The stack that predicts."""
        return "encoder" if self.about["shape"] == "encoder" else "decoder"

    @property
    def tokens(self) -> list[str]:
        """The tokens of that stack."""
        return list(self.reading["tokens"][self.side])

    @property
    def is_cheap(self) -> bool:
        """Whether a pass is so cheap that a document may hold one for every token."""
        return passes_allowed(self.workspace.trace(TextRequest(**self.body))) == MAX_PASSES

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The attention layers, as {kind, layer}."""
        return [{"kind": kind, "layer": n} for kind, found in self.about["kinds"].items() for n in found["layers"]]

    def heads(self, place: dict[str, Any]) -> int:
        """Return the number of heads of an attention layer."""
        found = self.about["kinds"][place["kind"]]
        return int(found["heads"][found["layers"].index(place["layer"])])

    def pairs(self, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield each query of a layer with its key of highest weight."""
        for head, strongest in enumerate(self.ask("heads", place)["strongest"]):
            yield from ({**place, "head": head, "query": query, "key": at} for query, at in enumerate(strongest))


class View(Part):
    """A request of the page about a run, and its answer."""

    request: ClassVar[type[RunRequest]]
    group: ClassVar[Literal["start", "attention", "prediction", "build", "runs"] | None] = None  # None: it has no tab
    place: ClassVar[int] = 99  # of the tab in its group
    title: ClassVar[str] = ""  # of the tab; the page has those of ours in its languages
    key: ClassVar[str] = ""  # on the keyboard

    def fits(self, run: Run) -> bool:
        """Return whether the page has a tab for it with this run."""
        return True

    @abstractmethod
    def respond(self, workspace: Any, request: Any) -> Answer:
        """Return the answer to a request; raise `ConfigError` if it has none."""

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        """Yield the requests that the page sends when it opens the view: a saved page has the answers."""
        fields = self.request.model_fields.items()
        if all(name in saved.body or not field.is_required() for name, field in fields):
            yield {}

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        """Yield those of clicks, which are saved while there is room."""
        yield from ()

    @property
    def tab(self) -> dict[str, Any]:
        """The tab as plain values."""
        return {"view": self.kind, "title": self.title, "group": self.group, "key": self.key}

    @property
    def order(self) -> tuple[int, int]:
        """The place of the tab; views without one are before all others."""
        return (-1 if self.group is None else GROUPS.index(self.group)), self.place


class TextView(View):
    """A view of one text, from the activations of its forward pass."""

    request: ClassVar[type[TextRequest]] = TextRequest

    @abstractmethod
    def answer(self, trace: Trace, request: Any) -> dict[str, Any]:
        """Return the answer as plain values."""

    def respond(self, workspace: Any, request: TextRequest) -> Answer:
        return self.answer(workspace.trace(request), request)


class Detail(TextView):
    """A view that others request on a click, since it takes further passes."""

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield from ()


def png(content: bytes) -> dict[str, str]:
    """Return a picture, such as a saved figure of matplotlib, as an entry of an answer."""
    return {"png": b64encode(content).decode()}
