"""A recipe for a user's files: its text with comments, and the reasons for each choice. Imports no torch.

The models are in `models.py`; batches and the training loop are here.
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.part import kind_of
from anyformer.config.spec import did_you_mean
from anyformer.data.readers import Rows
from anyformer.recipe import PARTS, Task
from anyformer.recipe.source import SPLITS
from anyformer.training.new_recipe import models
from anyformer.training.new_recipe.columns import Role
from anyformer.training.new_recipe.data import Sources, find_sources
from anyformer.training.new_recipe.models import DataFacts, RecipeLine
from anyformer.training.new_recipe.overrides import override_lines, toml
from anyformer.training.new_recipe.texts import TextStats, measure

TASKS = {  # the names that users give to tasks
    "translate": "seq2seq",
    "summarize": "seq2seq",
    "answer": "seq2seq",
    "seq2seq": "seq2seq",
    "classify": "classify",
    "tag": "tag",
    "ner": "tag",
    "pos": "tag",
    "lm": "lm",
    "mlm": "mlm",
    "regress": "regress",
    "embed": "embed",
}
ROLES: dict[str, tuple[Role, ...]] = {
    "seq2seq": ("source", "target"),
    "classify": ("text", "label"),
    "tag": ("words", "tags"),
    "lm": ("text",),
    "mlm": ("text",),
    "regress": ("text", "label"),
    "embed": ("text", "pair"),
}
CHARACTERS_PER_TOKEN = 3  # of a public tokenizer, at least
Reason = tuple[str, str, str]


@dataclass(frozen=True)
class RecipeRequest:
    """The wishes of a user."""

    task: str
    paths: list[str]
    columns: dict[Role, str]
    first: tuple[str, ModelConfig] | None  # the run that fine-tuning starts from
    lora: bool
    gpu: bool
    overrides: tuple[str, ...] = ()  # KEY=VALUE, as for `anyformer train`


@dataclass(frozen=True)
class RecipeDraft:
    """A recipe without its number of steps."""

    request: RecipeRequest
    facts: DataFacts
    sources: Sources

    @property
    def reasons(self) -> list[Reason]:
        """A choice, and its reason."""
        facts, tokenizer = self.facts, models.tokenizer(self.facts)
        stats = facts.inputs
        length = f"texts of {stats.mean_length:.0f} characters on average, {stats.longest:,} at most"
        if facts.task.kind == "lm":
            length = f"{stats.characters:,} characters"
        found = [*self.sources.reasons, ("script", stats.script, f"{stats.share:.0%} of the letters; {length}")]
        if facts.labels:
            found.append(("labels", f"{facts.labels:,}", self._label_examples()))
        found.append(("tokenizer", tokenizer.value, tokenizer.why))
        if facts.first is not None:
            found.append(
                ("model", facts.first[0], f"{facts.first[1].shape}, {facts.first[1].width} wide, with a new head")
            )
        else:
            found.append(
                ("model", f"{facts.layers} layers, {facts.width} wide", f"from scratch; small, for {facts.amount}")
            )
        return [*found, *(("given", text, "as KEY=VALUE says") for text in self.request.overrides)]

    def _label_examples(self) -> str:
        rows = self.sources.rows["train"]
        return ", ".join(label[:20] for label in _labels(rows)[:6]) + (", ..." if self.facts.labels > 6 else "")

    def text(self, steps: int, reason: str = "", minutes: float | None = None, cycles: int = 1) -> str:
        """Return the recipe, with the reason for its number of steps, or for the minutes that are given.

        `cycles`: of the learning rate, each twice as long as the one before.
        """
        facts, sources = self.facts, self.sources
        data = [RecipeLine("root", '"."', "paths begin where anyformer is run")]
        data += [
            RecipeLine(split, toml(source), f"{len(sources.rows[split]):,} {_plural(facts.task.kind)}")
            for split in SPLITS
            if (source := getattr(sources, split)) is not None
        ]
        if skipped := sources.skips or ("texts that are longer than the model can read" if self._too_long() else ""):
            data.append(RecipeLine("on_bad_row", '"skip"', skipped))
        sections = {
            "": [
                RecipeLine("task", toml(facts.task), _about(self.request.task)),
                models.tokenizer(facts),
                batches(facts),
            ],
            "data": data,
            **models.model(facts),
            "train": [
                *training(facts, steps, reason, minutes, cycles),
                *self._evaluation(steps if minutes is None else PARTS, cycles),
            ],
        }
        if self.request.overrides:
            sections = override_lines(sections, self.request.overrides)
        names = ", ".join(Path(path).name for path in self.request.paths)
        head = f"# {self.request.task}: {names}. Made by `anyformer new`; every line may be changed.\n"
        return head + models.as_toml(sections)

    def _too_long(self) -> bool:
        first = self.facts.first
        limits = [stack.limit for stack in first[1].stacks.values() if stack.limit] if first else []
        longest = self.facts.inputs.longest / CHARACTERS_PER_TOKEN
        return self.facts.task.kind not in ("lm", "classify") and any(longest > limit for limit in limits)

    def _evaluation(self, steps: int, cycles: int) -> list[RecipeLine]:
        if self.sources.valid is None:
            return []
        if cycles > 1:
            return [
                RecipeLine("best", f'"{self.facts.best}"', "selects the best of the evaluations, one for each cycle")
            ]
        times = 3 if self.facts.task.kind == "seq2seq" else 8
        every = RecipeLine(
            "evaluate_every", str(max(1, -(-steps // times))), f"{times} evaluations on the validation rows"
        )
        return [RecipeLine("best", f'"{self.facts.best}"', "selects the best of them"), every]


def _plural(kind: str) -> str:
    return {"lm": "text", "tag": "sentences"}.get(kind, "rows")


def _about(task: str) -> str:
    return {
        "seq2seq": "a text for each text",
        "classify": "a label for each text; of longer ones only max_length tokens are read",
        "tag": "a label for each word",
        "lm": "the next token of a text",
        "mlm": "masked tokens of a text",
        "regress": "a number for each text",
        "embed": "a vector for each text",
    }[TASKS[task]]


def task_kind(name: str) -> str:
    """Return the kind of a task by the name that a user gives it."""
    if name not in TASKS and name in map(kind_of, Task.choices()):
        what = f"`new` drafts no recipe for this task, but for {', '.join(TASKS)}: write one yourself"
        raise ConfigError([Fault("TASK", f"= '{name}': {what}")])
    if name not in TASKS:
        raise ConfigError([Fault("TASK", f"= '{name}': unknown; {did_you_mean(name, TASKS)}")])
    return TASKS[name]


def draft(request: RecipeRequest) -> RecipeDraft:
    """Examine the files of a request, and choose everything but the number of steps."""
    kind = task_kind(request.task)
    roles = ROLES[kind]
    if unknown := [role for role in request.columns if role not in (*roles, *(["pair"] if "label" in roles else []))]:
        wanted = ", ".join(f"--{role}" for role in roles)
        raise ConfigError([Fault(f"--{role}", f"the task {request.task} reads {wanted}") for role in unknown])
    sources = find_sources(request.paths, kind, roles, request.columns)
    rows = sources.rows["train"]
    task = _task(kind, request, sources)
    total = sources.examined.rows if kind == "lm" else sum(map(len, sources.rows.values()))
    inputs = _measure(rows, [role for role in ("source", "target", "text", "pair", "words") if role in rows.columns])
    labels = 0 if kind not in ("classify", "tag") else len(_labels(rows, getattr(task, "separator", None)))
    if labels == 1:
        what = f"all rows have the label '{_labels(rows)[0]}': a classifier needs two or more"
        raise ConfigError([Fault("--label" if kind == "classify" else "--tags", what)])
    outputs = _measure(rows, ["target"]) if kind == "seq2seq" else None
    facts = DataFacts(task, inputs, outputs, total, labels, request.gpu, request.first, request.lora)
    if kind == "classify":
        facts = replace(facts, task=task.model_copy(update={"max_length": models.max_length(facts)}))
    return RecipeDraft(request, facts, sources)


def _measure(rows: Rows, roles: list[str]) -> TextStats:
    texts = [text.replace("\n", " ") if role == "words" else text for role in roles for text in rows.columns[role]]
    return measure(texts, len(texts))


def _labels(rows: Rows, separator: str | None = None) -> list[str]:
    """Return the different labels or tags of some rows."""
    if "tags" in rows.columns:
        return sorted({tag for tags in rows.columns["tags"] for tag in tags.split("\n")})
    values = rows.columns.get("label", [])
    return sorted({one.strip() for value in values for one in (value.split(separator) if separator else [value])})


def _task(kind: str, request: RecipeRequest, sources: Sources) -> Task:
    rows = sources.rows["train"]
    pairs, fields = "pair" in rows.columns, dict[str, Any]()
    match kind:
        case "seq2seq":
            fields = _metrics(rows)
        case "classify":
            fields = {"pairs": pairs, "labels": _unseen(sources)}
        case "tag":
            tags = _labels(rows)
            spans = any(tag.startswith("B-") for tag in tags) and all(tag == "O" or tag[1:2] == "-" for tag in tags)
            fields = {"spans": spans, "labels": _unseen(sources)}
        case "regress":
            fields = {"pairs": pairs, "apart": pairs}
    known: Any = {kind_of(task): task for task in Task.choices()}
    made: Task = known[kind](**fields)
    return made


def _unseen(sources: Sources) -> tuple[str, ...]:
    """Return all labels if some are only in validation or test rows, where they would be errors; else none."""
    train = {*_labels(sources.rows["train"])}
    everywhere = {label for rows in sources.rows.values() for label in _labels(rows)}
    return tuple(sorted(everywhere)) if everywhere - train else ()


def _metrics(rows: Rows) -> dict[str, Any]:
    if importlib.util.find_spec("sacrebleu") is None:
        return {"metrics": ("exact_match",)}
    stats = measure(rows.columns["target"][:1000], 1000)
    return {"metrics": ("chrf", "bleu"), "bleu_tokenize": "char" if stats.is_cjk else "13a"}


def batches(facts: DataFacts) -> RecipeLine:
    """Return the batches of a task."""
    if facts.task.kind != "lm":
        if length := facts.packed_row:
            value = f'{{ kind = "packed", tokens = {max(facts.tokens, length)}, length = {length} }}'
            return RecipeLine("batches", value, "several texts in a row: one shape, which a GPU compiles once")
        if facts.gpu and not facts.compares:
            value = f'{{ kind = "padded", tokens = {facts.tokens}, few_shapes = true }}'
            return RecipeLine("batches", value, "rows of similar length, padded to one of a few")
        value = f'{{ kind = "padded", tokens = {facts.tokens} }}'
        return RecipeLine("batches", value, "rows of similar length, padded to the longest")
    longest = 256 if facts.gpu else 128
    limits = [stack.limit for stack in facts.first[1].stacks.values()] if facts.first else []
    length = max(8, min([longest, facts.inputs.characters // 20, *(n for n in limits if n is not None)]))
    rows = max(1, facts.tokens // longest)
    return RecipeLine(
        "batches", f'{{ kind = "crops", rows = {rows}, length = {length} }}', f"{rows} random parts of {length} tokens"
    )


def training(facts: DataFacts, steps: int, reason: str, minutes: float | None, cycles: int) -> Iterator[RecipeLine]:
    """Yield the settings of the training loop."""
    rate, decay = _rate(facts), 0.01 if facts.first else 0.05
    if minutes is None:
        yield RecipeLine("steps", str(steps), reason)
    else:
        steps = PARTS
        yield RecipeLine("minutes", f"{minutes:g}", f"of the whole training: {reason}")
        yield RecipeLine("steps", str(steps), "parts of this time, by which warm-up and evaluations are counted")
    adam = f'{{ kind = "adamw", lr = {rate}, betas = [0.9, 0.98], weight_decay = {decay} }}'
    yield RecipeLine(
        "optimizer", adam, "lr: the peak of the learning rate" + (", low for pretrained weights" * (rate < 5e-4))
    )
    warmup = max(1, steps // (2**cycles - 1) // 10)
    more, why = "", "rises over the first tenth, then falls to 0"
    if cycles > 1:
        more, why = f", cycles = {cycles}", "the data are read many times: the best end of a cycle is kept"
    yield RecipeLine("schedule", f'{{ kind = "cosine", warmup = {warmup}, floor = 0.0{more} }}', why)
    if facts.first and not facts.lora:
        yield RecipeLine("layer_decay", "0.9", "lower layers learn more slowly")
    if facts.task.kind == "seq2seq" or (
        facts.task.kind == "classify" and getattr(facts.task, "separator", None) is None
    ):
        yield RecipeLine("label_smoothing", "0.1", "keeps probabilities away from 0 and 1")


def _rate(facts: DataFacts) -> float:
    """Return the learning rate: that of the usual batch, times the square root of the ratio of their tokens."""
    if facts.first is not None and not facts.lora:
        usual = 5e-5 if facts.first[1].width >= 768 else 1e-4
    else:
        usual = 2e-3 if facts.task.kind in ("lm", "tag") and not facts.first else 1e-3
    return float(f"{usual * math.sqrt(facts.tokens / facts.usual_tokens):.2g}")
