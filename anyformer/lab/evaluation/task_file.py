"""Read task files: a part of the YAML of lm-evaluation-harness, with rows from a local file. Imports no torch.

    task: colours
    dataset_path: json
    dataset_kwargs: {data_files: {test: colours.jsonl}}     # beside the task file
    output_type: multiple_choice
    doc_to_text: "Question: {{question}}\\nAnswer:"
    doc_to_choice: "{{choices}}"
    doc_to_target: "{{answer}}"

A `doc_to_…` is the name of a column or a template of Jinja over the columns. Templates run in a sandbox.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from anyformer.config import io
from anyformer.config.spec import ConfigError, Fault, Flag, Spec, visible
from anyformer.runs.atomic_folder import must_be_file

YAML = (".yaml", ".yml")
MAX_BYTES = 2**30  # of a file of rows
SHOWN = 60  # characters of a value in an error

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling"]
# Metrics of each type, with how rows are combined: the first are those without a metric_list.
METRICS: dict[str, dict[str, str]] = {
    "multiple_choice": {"acc": "mean", "acc_norm": "mean"},
    "loglikelihood": {"perplexity": "perplexity", "acc": "mean"},
    "loglikelihood_rolling": {
        "word_perplexity": "weighted_perplexity",
        "byte_perplexity": "weighted_perplexity",
        "bits_per_byte": "bits_per_byte",
    },
}


class DataFiles(Spec):
    """The files of rows, by the name of their split; a single name is that of the test split."""

    data_files: dict[str, str] | str  # .jsonl, one object per line, or .json, a list of objects

    def file(self, split: str) -> str | None:
        return self.data_files if isinstance(self.data_files, str) else self.data_files.get(split)


class MetricChoice(Spec):
    """A metric to report."""

    metric: str  # its name
    aggregation: str | None = None  # how rows are combined; None: the usual one, and no other is supported
    higher_is_better: Flag | None = None  # True for acc and acc_norm, False for the others


class TaskFile(Spec):
    """A local task: rows, and templates that make prompts of them."""

    task: Annotated[str, Field(min_length=1)]  # its name in results
    dataset_path: Literal["json"] = "json"  # the kind of files
    dataset_kwargs: DataFiles  # where the rows are
    test_split: str = "test"  # split that is evaluated
    output_type: OutputType  # what is computed for each row
    doc_to_text: str = ""  # the context: a column or a template
    doc_to_choice: str | tuple[str, ...] | None = None  # the answers to compare: a column, a template or a list
    doc_to_target: str | int  # index or text of the right answer; or the text to score
    target_delimiter: str = " "  # between the context and an answer
    description: str = ""  # text before each context
    metric_list: tuple[MetricChoice, ...] = ()  # metrics to report; none: the usual ones of the type
    num_fewshot: Literal[0] = 0  # examples before each question: only 0 is supported
    metadata: dict[str, Any] = Field(default_factory=dict)  # version and the like, which are printed with the results

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if faults := list(self._faults()):
            raise ConfigError(faults)
        return self

    def _faults(self) -> Iterator[Fault]:
        choice = self.output_type == "multiple_choice"
        if choice != (self.doc_to_choice is not None):
            yield Fault("doc_to_choice", "is missing" if choice else f"is not for output_type = {self.output_type}")
        if self.output_type == "loglikelihood_rolling" and (self.doc_to_text or self.description):
            name = "doc_to_text" if self.doc_to_text else "description"
            yield Fault(name, "is not for loglikelihood_rolling: the text to score is doc_to_target")
        if self.dataset_kwargs.file(self.test_split) is None:
            yield Fault("dataset_kwargs.data_files", f"has no file for the split '{self.test_split}'")
        known = METRICS[self.output_type]
        for i, one in enumerate(self.metric_list):
            path = f"metric_list.{i}"
            if one.metric not in known:
                yield Fault(f"{path}.metric", f"= '{one.metric}': {self.output_type} has {', '.join(known)}")
            elif one.aggregation not in (None, known[one.metric]):
                yield Fault(f"{path}.aggregation", f"= '{one.aggregation}': must be '{known[one.metric]}'")
            elif one.higher_is_better not in (None, one.metric.startswith("acc")):
                yield Fault(f"{path}.higher_is_better", f"must be {one.metric.startswith('acc')}")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics to report."""
        return tuple(one.metric for one in self.metric_list) or tuple(METRICS[self.output_type])


class Item(NamedTuple):
    """A row with its templates filled in."""

    context: str
    choices: tuple[str, ...]  # empty unless the task is multiple_choice
    target: str | int  # the index of a choice, else a text


def read_task(path: str | Path) -> TaskFile:
    """Read a task file: YAML, or the same as TOML or JSON."""
    path = Path(path)
    tables = _read_yaml(path) if path.suffix.lower() in YAML else io.read_tables(path)
    with io.faults_in(path):
        try:  # results repeat `metadata`
            json.dumps(tables, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # dates, sets, NaN, integers of thousands of digits
            raise ConfigError([Fault("", f"holds a value that JSON does not have: {error}")]) from None
        return io.build(TaskFile, tables)


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError([Fault(str(path), "needs the package PyYAML: pip install 'anyformer[eval]'")]) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package has no types
        """YAML without aliases, which can make a short file a huge value; dates are texts."""

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem="aliases (*name) are not read", problem_mark=mark)
            return super().compose_node(parent, index)

    try:
        return yaml.load(io.read_text(must_be_file(path)), Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        what = visible(getattr(error, "problem", None) or str(error)).partition("\n")[0]
        raise ConfigError([Fault(str(path), f"is not YAML that is read{where}: {what}")]) from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # a date that does not exist, an integer of thousands of digits
        raise ConfigError([Fault(str(path), f"cannot be read: {error}")]) from None


def read_items(task: TaskFile, folder: Path, limit: int | None = None) -> list[Item]:
    """Return the rows of a task, the first `limit` of them; `folder` is that of the task file."""
    name = task.dataset_kwargs.file(task.test_split)
    assert name is not None
    path = folder / name
    rows = list(_rows(path))[:limit]
    if not rows:
        raise ConfigError([Fault(visible(str(path)), "holds no row")])
    fill = _Templates(task)
    items = []
    for number, row in rows:
        try:
            items.append(fill.item(row))
        except _RowFault as fault:
            raise ConfigError([Fault(f"{visible(str(path))}: row {number}: {fault.field}", str(fault))]) from None
    return items


def request_count(path: str | Path, limit: int | None = None) -> int:
    """Return the number of log-likelihoods that a task file needs, at least; raise a `ConfigError` if it is wrong."""
    items = read_items(read_task(path), Path(path).parent, limit)
    return sum(len(item.choices) or 1 for item in items)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the columns of each row."""
    where = visible(str(path))
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError([Fault(where, "is not read: rows are in a .jsonl or .json file")])
    if must_be_file(path).stat().st_size > MAX_BYTES:
        raise ConfigError([Fault(where, f"is larger than {MAX_BYTES:,} bytes")])
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
            numbered = list(enumerate(rows if isinstance(rows, list) else [rows], 1))
        else:
            numbered = [(i, json.loads(line)) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Fault(where, f"cannot be read as JSON: {error}")]) from None
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError([Fault(f"{where}: row {number}", "is not a JSON object")])
        yield number, row


class _RowFault(Exception):
    """A row that a template does not fit."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class _Templates:
    """The compiled templates of a task."""

    def __init__(self, task: TaskFile):
        self.task = task
        self._compiled: dict[str, Any] = {}

    def item(self, row: dict[str, Any]) -> Item:
        """Fill in one row."""
        task = self.task
        if task.output_type != "multiple_choice":
            target = self._value("doc_to_target", task.doc_to_target, row)
            if not isinstance(target, str):
                raise _RowFault("doc_to_target", f"= {_shown(target)}: must be a text")
            return Item(self._context(row), (), target)
        choices = self._choices(row)
        return Item(self._context(row), choices, self._index(row, choices))

    def _context(self, row: dict[str, Any]) -> str:
        text = self._value("doc_to_text", self.task.doc_to_text, row) if self.task.doc_to_text else ""
        if not isinstance(text, str):
            raise _RowFault("doc_to_text", f"= {_shown(text)}: must be a text")
        return self.task.description + text

    def _choices(self, row: dict[str, Any]) -> tuple[str, ...]:
        given = self.task.doc_to_choice
        if isinstance(given, str):
            found = row[given] if given in row else self._literal(self._value("doc_to_choice", given, row))
        else:
            found = given
        if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) and one for one in found):
            raise _RowFault("doc_to_choice", f"= {_shown(found)}: must be a list of texts")
        return tuple(found)

    def _index(self, row: dict[str, Any], choices: tuple[str, ...]) -> int:
        found = self._value("doc_to_target", self.task.doc_to_target, row)
        if isinstance(found, str) and re.fullmatch(r"\d{1,9}", found) and found not in choices:
            found = int(found)
        if isinstance(found, str) and found in choices:
            return choices.index(found)
        if type(found) is int and 0 <= found < len(choices):
            return found
        raise _RowFault("doc_to_target", f"= {_shown(found)}: must be one of the {len(choices)} choices, or its index")

    def _value(self, field: str, template: str | int, row: dict[str, Any]) -> Any:
        if isinstance(template, int):
            return template
        if template not in row and template.isidentifier():
            columns = f"the columns are {_shown(', '.join(map(str, row)))}"
            raise _RowFault(field, f"= {_shown(template)}: is no column; {columns}; a text is {{{{ {template!r} }}}}")
        return row[template] if template in row else self._render(field, template, row)

    def _literal(self, text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise _RowFault("doc_to_choice", f"= {_shown(text)}: must be a list of texts") from None

    def _render(self, field: str, template: str, row: dict[str, Any]) -> str:
        try:
            if field not in self._compiled:
                self._compiled[field] = self._sandbox.compile_prompt(template)
            return self._sandbox.render(self._compiled[field], row)
        except Exception as error:  # a template may raise anything
            raise _RowFault(field, f"fails: {visible(str(error)).partition(chr(10))[0]}") from None

    @cached_property
    def _sandbox(self) -> Any:
        try:
            from anyformer.data import template_sandbox
        except ImportError:
            what = "templates need the package Jinja2: pip install 'anyformer[eval]'"
            raise ConfigError([Fault("doc_to_text", what)]) from None
        return template_sandbox


def _shown(value: Any) -> str:
    text = visible(repr(value))
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
