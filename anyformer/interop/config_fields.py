"""Read the fields of a public config.json: each is used, refused, or ignored as `transformers` ignores it."""

import math
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from anyformer import config as spec
from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean, visible

T = TypeVar("T")
MAX_LAYERS = 2000  # the deepest published models have a few hundred
MAX_LABELS = 1_000_000
MULTI_LABEL = "multi_label_classification"

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
shown = _SHORT.repr  # a value in an error message, shortened

# Activations by name; of several names for one activation, the first is written.
ACTIVATIONS: dict[str, spec.Activation] = {
    "gelu": spec.Gelu(),
    "gelu_python": spec.Gelu(),
    "gelu_new": spec.Gelu(approximate="tanh"),
    "gelu_pytorch_tanh": spec.Gelu(approximate="tanh"),
    "gelu_fast": spec.Gelu(approximate="tanh"),
    "gelu_accurate": spec.Gelu(approximate="tanh"),
    "quick_gelu": spec.QuickGelu(),
    "relu": spec.Relu(),
    "relu2": spec.SquaredRelu(),
    "silu": spec.Silu(),
    "swish": spec.Silu(),
    "tanh": spec.Tanh(),
    "sigmoid": spec.Sigmoid(),
    "linear": spec.Identity(),
}

# Fields about files, training or text generation, not about the model.
# fmt: off
SILENT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "bad_words_ids",
    "begin_suppress_tokens", "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range", "label2id", "language",
    "length_penalty", "mask_token_id", "max_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "prefix", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "unk_token_id", "use_bfloat16",
    "use_cache",
})
# fmt: on


class Fields:
    """A config.json that is being read: `fields("hidden_size")` returns a field, or the default of `transformers`.

    A field that a family reads is used. An unread field is an error if `transformers` uses it (it is in `known`, or
    `known` is None), because it may change the model; otherwise it is added to `ignored`.
    """

    def __init__(self, data: Mapping[str, Any], file: str | Path, weights: Callable[[], Collection[str]] = tuple):
        self._data, self._file, self._weights = dict(data), file, weights
        self._read: set[str] = set()
        self._faults: list[Fault] = []
        self._above = ""  # the path of the table that holds these fields
        self.known: Mapping[str, Any] | None = None  # the fields that `transformers` uses, with their defaults
        self.ignored: list[str] = []
        self.head = ""  # the kind of head that its class has

    @overload
    def __call__(self, field: str, *, least: int = 1) -> Any: ...
    @overload
    def __call__(self, field: str, default: T | None, least: int = 1) -> T: ...
    def __call__(self, field: str, default: Any = None, least: int = 1) -> Any:
        """Return a field, which must have the type of its default; null counts as left out."""
        default, value = self.default(field) if default is None else default, self._take(field)
        assert default is not None, field
        return default if value is None else self._as(type(default), field, value, least)

    def default(self, field: str) -> Any:
        """Return the default of `transformers`, None if it declares none."""
        return None if self.known is None else self.known.get(field)

    def maybe(self, field: str, kind: type[T]) -> T | None:
        """Return a field that may be left out or null."""
        value = self._take(field)
        return None if value is None else self._as(kind, field, value)

    def nullable(self, field: str, kind: type[T]) -> T | None:
        """Return a field whose null does not mean its default."""
        return self.maybe(field, kind) if field in self._data else self.default(field)

    def any(self, field: str, default: Any) -> Any:
        """Return a field of any type, which the caller checks; null counts as left out."""
        value = self._take(field)
        return default if value is None else value

    def must(self, field: str, *values: Any) -> None:
        """Refuse a field unless it is left out, null, or one of these values, or `transformers` does not use it."""
        value = self._data.get(field)
        if value is None or value in values:
            self._read.add(field)
        elif self.known is None or field in self.known:
            self._read.add(field)
            only = " or ".join(map(repr, values)) or "null"
            self.refuse(field, f"= {shown(value)}: only {only} is supported{self._hint(field)}")

    def change(self, field: str, value: Any) -> None:
        """Replace a field."""
        self._data[field] = value

    def silent(self, *fields: str) -> None:
        """Accept fields of any value: they do not change what the model computes."""
        self._read.update(fields)

    def alias(self, other: str, field: str) -> None:
        """Read `other` as a second name of a field. Both with different values are an error."""
        value = self._data.get(other)
        if value is None:
            return
        if self._data.get(field) is None:
            self._data[field] = value
        elif self._data[field] != value:
            both = f"is another name of {field}, which is {shown(self._data[field])}"
            self.refuse(other, f"= {shown(value)}: {both}{self._hint(other)}")
        del self._data[other]

    def refuse(self, field: str, message: str) -> None:
        """Record a fault; `finish` raises all of them."""
        self._faults.append(self.fault(field, message))

    def one_of(self, field: str, known: Mapping[str, T], default: str | None = None) -> T:
        """Return the value that a field selects from `known`."""
        name = self(field, default)
        if name not in known:
            raise ConfigError([self.fault(field, f"= {shown(name)}: {did_you_mean(name, known)}")])
        return known[name]

    def names(self, field: str) -> list[str]:
        """Return a list of names, or the names in a text, which bars separate."""
        value = self._take(field)
        found = value.lower().split("|") if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ConfigError([self.fault(field, f"= {shown(value)}: must be a list of names")])
        return [name.strip() for name in found if name.strip()]

    def has(self, weight: str) -> bool:
        """Return whether a tensor has this name, with any prefix: some facts are in the weights alone."""
        return any(name == weight or name.endswith(f".{weight}") for name in self._weights())

    def table(self, field: str, data: Any) -> "Fields":
        """Return a table inside these fields, which shares faults and ignored fields with them."""
        inner = Fields(data if isinstance(data, dict) else {}, self._file)
        if not isinstance(data, dict):
            self.refuse(field, f"= {shown(data)}: must be a table")
        inner._above, inner._faults, inner.ignored = f"{self._above}{field}.", self._faults, self.ignored
        return inner

    def fault(self, field: str, message: str) -> Fault:
        return Fault(f"{visible(str(self._file))}: {visible(self._above + field)}", visible(message))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the file in faults of a config that is made of these fields."""
        file = visible(str(self._file))
        try:
            yield
        except ConfigError as error:
            faults = (
                f if f.path.startswith(f"{file}: ") else Fault(f"{file}: {f.path}", f.message) for f in error.faults
            )
            raise ConfigError([*self._faults, *faults]) from None

    def close(self) -> None:
        """Record unread fields, as faults or as ignored."""
        for field in sorted(self._data):
            if field in self._read | SILENT or self._data[field] is None:
                continue
            if self.known is not None and field not in self.known:
                self.ignored.append(visible(self._above + field))
            else:
                what = "is not supported, and the model would be another one without it"
                self.refuse(field, f"= {shown(self._data[field])}: {what}{self._hint(field)}")

    def faults(self) -> list[Fault]:
        """Return all that is wrong, once everything is read."""
        self.close()
        return self._faults

    def finish(self) -> None:
        """Raise all faults."""
        if faults := self.faults():
            raise ConfigError(faults)

    def _hint(self, field: str) -> str:
        """Return a hint to the option that ignores a field of config.json."""
        return (
            "" if self.known is None else f"; --ignore-field {visible(self._above + field)} reads the file without it"
        )

    def _take(self, field: str) -> Any:
        self._read.add(field)
        return self._data.get(field)

    def _as(self, kind: type[T], field: str, value: Any, least: int = 1) -> T:
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 2**63 else math.inf
        if type(value) is not kind:
            raise ConfigError([self.fault(field, f"= {shown(value)}: must be of type {kind.__name__}")])
        if isinstance(value, int) and kind is int and value < least:
            raise ConfigError([self.fault(field, f"= {value}: must be at least {least}")])
        return value

    # -- fields of several families -----------------------------------------------------------------------------------

    def activation(self, field: str, default: str | None = None) -> spec.Activation:
        return self.one_of(field, ACTIVATIONS, default)

    def depth(self, field: str, default: int | None = None) -> int:
        """Return a number of layers, at most `MAX_LAYERS`."""
        found: int = self(field, default)
        if found > MAX_LAYERS:
            raise ConfigError([self.fault(field, f"= {found}: must be at most {MAX_LAYERS}")])
        return found

    def layer_types(self, depth: int, default: Sequence[str], known: Collection[str]) -> list[str]:
        """Return the kind of each layer."""
        kinds = self.maybe("layer_types", list) or list(default)
        if len(kinds) != depth or not all(isinstance(kind, str) and kind in known for kind in kinds):
            what = f"must be {depth} of {' and '.join(known)}"
            raise ConfigError([self.fault("layer_types", f"= {shown(kinds)}: {what}")])
        return kinds

    def special(self, vocab: int, **start: int | None) -> spec.Special:
        """Return the special ids. The first of several that end a text is `eos`. A default of the family that is
        outside a smaller vocabulary is dropped. `start`: there is a first id of a decoder, with this default."""
        found: dict[str, Any] = {}
        for role in ("pad", "bos", "eos", *start):
            field = f"{'decoder_start' if role == 'start' else role}_token_id"
            default, value = start.get(role, self.default(field)), self._take(field)
            several = value if role == "eos" and isinstance(value, list) else [value]
            if not all(type(id) is int or id is None for id in several):
                raise ConfigError([self.fault(field, f"= {shown(value)}: must be the id of a token")])
            ids = [id for id in several if id is not None and id >= 0 and (id < vocab or id != default)]
            if value is None and (field not in self._data or role == "start") and default is not None:
                ids = [default] if default < vocab else []
            found[role] = ids[0] if ids else None
            if role == "eos":
                found["stops"] = tuple(ids[1:])
        return spec.Special(**found)

    def labels(self, usual: int = 2) -> tuple[str, ...]:
        """Return the names of the labels, by number; `usual` many if the file does not say.

        Names that are not `num_labels` many are left out, as `transformers` does.
        """
        if self.head == "classifier":
            self.must("problem_type", "single_label_classification", MULTI_LABEL)
        named, count = self.maybe("id2label", dict), self.maybe("num_labels", int)
        if count is not None and count > MAX_LABELS:
            raise ConfigError([self.fault("num_labels", f"= {count}: must be at most {MAX_LABELS:,}")])
        if named is not None and count not in (None, len(named)):
            what = f"num_labels = {count}: id2label names {len(named)} labels, which are left out as in transformers"
            warnings.warn(f"{visible(str(self._file))}: {what}: labels are LABEL_0, LABEL_1, ...", stacklevel=3)
            self.change("id2label", None)
            named = None
        if named is None:
            return tuple(f"LABEL_{i}" for i in range(count or usual))
        try:
            names = {int(i): str(name) for i, name in named.items()}
            return tuple(names[i] for i in range(len(names)))
        except (KeyError, ValueError):
            raise ConfigError([self.fault("id2label", "must name the labels 0, 1, 2, ...")]) from None

    @property
    def multi_label(self) -> bool:
        """True if a text may have any number of labels."""
        return self.head == "classifier" and self._data.get("problem_type") == MULTI_LABEL


def name_of(activation: spec.Activation, first: str = "") -> str:
    """Return the public name of an activation, `first` if it is one of its names; without one, our kind."""
    names = [name for name, found in ACTIVATIONS.items() if found == activation]
    return first if first in names else next(iter(names), activation.kind)
