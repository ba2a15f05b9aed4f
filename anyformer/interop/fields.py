"""The fields of a public config.json: each one is read, or known to say nothing about the model, or an error."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from anyformer.config import (
    Activation,
    ConfigError,
    Fault,
    Gelu,
    Identity,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    Relu,
    Rotary,
    RotaryScaling,
    Sigmoid,
    Silu,
    Special,
    SquaredRelu,
    Tanh,
    YarnScaling,
)
from anyformer.config.spec import did_you_mean, visible

T = TypeVar("T")

# By their names; of several names for one, the first is written.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Gelu(),
    "gelu_python": Gelu(),
    "gelu_new": Gelu(approximate="tanh"),
    "gelu_pytorch_tanh": Gelu(approximate="tanh"),
    "gelu_fast": Gelu(approximate="tanh"),
    "gelu_accurate": Gelu(approximate="tanh"),
    "relu": Relu(),
    "relu2": SquaredRelu(),
    "silu": Silu(),
    "swish": Silu(),
    "tanh": Tanh(),
    "sigmoid": Sigmoid(),
    "linear": Identity(),
}

# About files, training, or how text is drawn from a model, not about the model.
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
    """A config.json that is being read: `given("hidden_size", 768)` is a field, or what it is where it is left out."""

    def __init__(self, data: Mapping[str, Any], file: str | Path, weights: Callable[[], Collection[str]] = tuple):
        self._data, self._file, self._weights = data, file, weights
        self._read: set[str] = set()
        self._faults: list[Fault] = []
        self.head = ""  # the kind of head that its class has

    def __call__(self, field: str, default: T) -> T:
        """A field of the type of its default; null counts as left out."""
        value = self._take(field)
        return default if value is None else self._as(type(default), field, value)

    def maybe(self, field: str, kind: type[T]) -> T | None:
        """A field that may be left out or null."""
        value = self._take(field)
        return None if value is None else self._as(kind, field, value)

    def nullable(self, field: str, default: T) -> T | None:
        """A field whose null is another thing than its absence."""
        value = self._take(field)
        if value is None:
            return None if field in self._data else default
        return self._as(type(default), field, value)

    def must(self, field: str, *values: Any) -> None:
        """A field that we honour only where it says this, or nothing."""
        value = self._take(field)
        if value is not None and value not in values:
            self._faults.append(self.fault(field, f"= {value!r}: only {' or '.join(map(repr, values))} is read"))

    def silent(self, *fields: str) -> None:
        """Fields that say nothing about the model."""
        self._read.update(fields)

    def refuse(self, field: str, message: str) -> None:
        """Notes what is wrong with a field."""
        self._faults.append(self.fault(field, message))

    def one_of(self, field: str, known: Mapping[str, T], default: str) -> T:
        """A field that names one of some things."""
        name = self(field, default)
        if name not in known:
            raise ConfigError([self.fault(field, f"= {name!r}: {did_you_mean(name, known)}")])
        return known[name]

    def has(self, weight: str) -> bool:
        """Whether there is a tensor of this name, with anything before it: some tell what a config does not."""
        return any(name == weight or name.endswith(f".{weight}") for name in self._weights())

    def fault(self, field: str, message: str) -> Fault:
        return Fault(f"{visible(str(self._file))}: {visible(field)}", visible(message))

    def finish(self) -> None:
        """Every field has been read, or this names those that were not."""
        left = [f for f, value in self._data.items() if f not in self._read | SILENT and value is not None]
        unread = [
            self.fault(field, f"= {self._data[field]!r}: is not known, so the model would not be this one")
            for field in sorted(left)
        ]
        if found := [*self._faults, *unread]:
            raise ConfigError(found)

    def _take(self, field: str) -> Any:
        self._read.add(field)
        return self._data.get(field)

    def _as(self, kind: type[T], field: str, value: Any) -> T:
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError([self.fault(field, f"= {value!r}: must be of type {kind.__name__}")])
        return value

    # -- what families share ------------------------------------------------------------------------------------------

    def activation(self, field: str, default: str) -> Activation:
        return self.one_of(field, ACTIVATIONS, default)

    def special(self, **defaults: int | None) -> Special:
        """Ids with a meaning; of several that end a text, the first is `eos`."""
        found: dict[str, Any] = {}
        for role in ("pad", "bos", "eos"):
            value = self._take(f"{role}_token_id")
            if isinstance(value, list) and value:
                value, *others = value
                if role == "eos":
                    found["stops"] = tuple(id for id in others if type(id) is int and id >= 0)
            default = None if f"{role}_token_id" in self._data else defaults.get(role)
            found[role] = value if type(value) is int and value >= 0 else default
        start = self.maybe("decoder_start_token_id", int)
        if "start" in defaults:
            found["start"] = defaults["start"] if start is None else start
        return Special(**found)

    def labels(self) -> tuple[str, ...]:
        """The names of the labels, by number."""
        self.must("problem_type", "single_label_classification")
        named = self._data.get("id2label")
        if named is None:
            return tuple(f"LABEL_{i}" for i in range(self("num_labels", 2)))
        try:
            names = {int(i): str(name) for i, name in named.items()}
            return tuple(names[i] for i in range(len(names)))
        except (AttributeError, KeyError, ValueError):
            raise ConfigError([self.fault("id2label", "must name the labels 0, 1, 2, ...")]) from None

    def rotary(self, theta: float, fraction: float | None = None) -> Rotary:
        """Rotary positions, as `rope_parameters` or as older files say it; a `fraction` of each head, or all of it."""
        old_theta, old_fraction = self("rope_theta", theta), self.fraction(fraction)
        given = self.maybe("rope_parameters", dict) or self.maybe("rope_scaling", dict) or {}
        self.silent("rope_scaling", "rope_parameters")
        length = self.maybe("max_position_embeddings", int)
        return read_rotary(Fields(given, f"{self._file}: rope_parameters"), old_theta, old_fraction, length)

    def fraction(self, usual: float | None) -> float | None:
        """Most families leave this field unread, whatever it says."""
        if usual is not None:
            return self("partial_rotary_factor", usual)
        self.must("partial_rotary_factor", 1.0)
        return None

    def rotaries(
        self, theta: float, near: float, full: str = "full_attention", local: str = "sliding_attention"
    ) -> tuple[Rotary, Rotary]:
        """Rotary positions of layers that see all, and of those that see a window; older files scale the first."""
        given = self.maybe("rope_parameters", dict)
        if given is None or not {full, local} & given.keys():
            return self.rotary(theta), Rotary(theta=near)
        self.silent("rope_theta", "rope_scaling")
        length = self.maybe("max_position_embeddings", int)
        tables = (Fields(given.get(kind) or {}, f"{self._file}: rope_parameters.{kind}") for kind in (full, local))
        first, second = (
            read_rotary(table, base, None, length) for table, base in zip(tables, (theta, near), strict=True)
        )
        return first, second


def read_rotary(given: Fields, theta: float, fraction: float | None, length: int | None) -> Rotary:
    """One table of `rope_parameters`."""
    kind = given.maybe("rope_type", str) or given("type", "default")
    given.silent("type")
    theta, part = given("rope_theta", theta), given.fraction(fraction)
    scaling: RotaryScaling
    if kind == "default":
        scaling = NoScaling()
    elif kind == "linear":
        scaling = LinearScaling(factor=given("factor", 1.0))
    elif kind in ("yarn", "llama3"):
        original = given.maybe("original_max_position_embeddings", int) or length
        if original is None:
            raise ConfigError([given.fault("original_max_position_embeddings", "is missing")])
        if kind == "llama3":
            low, high = given("low_freq_factor", 1.0), given("high_freq_factor", 4.0)
            scaling = Llama3Scaling(
                factor=given("factor", 1.0), original_length=original, low_frequency=low, high_frequency=high
            )
        else:
            given.must("truncate", True)
            given.must("mscale", 0.0)
            given.must("mscale_all_dim", 0.0)
            scaling = YarnScaling(
                factor=given("factor", (length or original) / original),
                original_length=original,
                beta_fast=given("beta_fast", 32.0),
                beta_slow=given("beta_slow", 1.0),
                attention_factor=given.maybe("attention_factor", float),
            )
    else:
        raise ConfigError([given.fault("rope_type", f"= {kind!r}: known here are default, linear, llama3, yarn")])
    given.finish()
    return Rotary(theta=theta, fraction=1.0 if part is None else part, scaling=scaling)


def write_rotary(rotary: Rotary, key_width: int) -> dict[str, Any]:
    """`rope_parameters`; what NTK scaling does is a larger theta."""
    rotary = plain_theta(rotary, key_width)
    found: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": "default"}
    if rotary.fraction != 1:
        found["partial_rotary_factor"] = rotary.fraction
    match rotary.scaling:
        case LinearScaling(factor=factor):
            found |= {"rope_type": "linear", "factor": factor}
        case YarnScaling() as yarn:
            found |= {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_length,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
            }
            if yarn.attention_factor is not None:
                found["attention_factor"] = yarn.attention_factor
        case Llama3Scaling() as llama:
            found |= {
                "rope_type": "llama3",
                "factor": llama.factor,
                "original_max_position_embeddings": llama.original_length,
                "low_freq_factor": llama.low_frequency,
                "high_freq_factor": llama.high_frequency,
            }
    return found


def plain_theta(rotary: Rotary, key_width: int) -> Rotary:
    """The same turns without NTK scaling, which is a larger theta."""
    if not isinstance(rotary.scaling, NTKScaling):
        return rotary
    width = rotary.rotated(key_width)
    theta = rotary.theta * rotary.scaling.factor ** (width / (width - 2))
    return rotary.model_copy(update={"theta": theta, "scaling": NoScaling()})


def length_of(rotary: Rotary, usual: int) -> int:
    """`max_position_embeddings`, which nothing but a stretched context tells."""
    match rotary.scaling:
        case YarnScaling(factor=factor, original_length=length) | Llama3Scaling(factor=factor, original_length=length):
            return int(factor * length)
    return usual


def name_of(activation: Activation, first: str = "") -> str:
    """Their name of an activation, that one if it is a name of it; of one that has none, ours, which nothing reads."""
    names = [name for name, found in ACTIVATIONS.items() if found == activation]
    return first if first in names else next(iter(names), activation.kind)
