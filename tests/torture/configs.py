"""Mutate configs of models, recipes and grids: each gives a config, or a short `ConfigError` in bounded time.

A config that is read comes back from its text, and its model is counted at once. Of models that are small enough, some
are built, and their parameters are those that were counted.
"""

import argparse
import copy
import json
import random
import string
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import tomli_w
import torch

from anyformer.config import ConfigError, ModelConfig, Spec, Tokens, io
from anyformer.lab.grid import Axis, Grid, Steps
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import check_model, training_memory
from anyformer.nn.model import Transformer
from anyformer.presets import PRESETS
from anyformer.recipe import Recipe
from anyformer.recipe.ready import names, read_recipe
from tests.torture.limited import Broken, run_cases

SECONDS = 5.0  # of a case
LONGEST = 5000  # characters of an error
BUILT = 0.2  # of the models that are read, how many are built
DEEPEST = 48  # layers of a model that is built
MOST_PARAMETERS = 10**15  # of one: torch counts bytes in 64 bits
ODD_KEYS = (
    "",
    " ",
    "a.b",
    "é",
    "깊이",
    "深度",
    "\U0001f600",
    "k" * 5000,
    "__class__",
    "model_fields",
    "kind",
    "0",
    "*",
    "-1",
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**12, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e38, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "none", "lm", "rotary", "ａｂｃ", "１２", "1_000", "x" * 10_000, "\0", "한국어", "a\nb", "nan", "[]", "{}"),
    *([], {}, [[]], [{}], {"kind": "rotary"}, {"kind": None}, {"kind": ["x"]}, {"": 1}, [1, [2]], [1, "a", None, 2.5]),
)


def bases() -> list[Spec]:
    axes = (
        Axis(name="position", fields=("model.decoder.position",), values=("sinusoidal", "rotary")),
        Axis(name="depth", fields=("model.decoder.depth",), values=(1, 2)),
    )
    models: list[Spec] = [preset() for preset in PRESETS.values()]
    return [*models, *map(read_recipe, names()), *[Grid(base="sort", axes=axes, budget=Steps(count=100))] * 5]


# -- mutations of data ------------------------------------------------------------------------------------------------


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [(data, key) for key in keys] + [place for key in keys for place in places(data[key])]


def odd(rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0:
            return rng.randint(-(10 ** rng.randint(0, 25)), 10 ** rng.randint(0, 25))
        case 1:
            return rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300)
        case 2:
            deep: Any = 1
            for _ in range(rng.choice((3, 30, 200))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            return deep
        case 3:
            return "".join(chr(rng.randrange(0xD800)) for _ in range(rng.choice((1, 10, 1000))))
        case 4:
            return [copy.deepcopy(rng.choice(ODD_VALUES)) for _ in range(rng.choice((1, 5, 2000)))]
        case _:
            return copy.deepcopy(rng.choice(ODD_VALUES))


def values_by_key(specs: list[Spec]) -> dict[Any, list[Any]]:
    """The values that each key has anywhere."""
    found: dict[Any, list[Any]] = {}
    for spec in specs:
        for container, key in places(io.to_data(spec)):
            if container[key] not in found.setdefault(key, []):
                found[key].append(container[key])
    return found


def mutate(data: Any, known: dict[Any, list[Any]], rng: random.Random) -> None:
    container, key = rng.choice(places(data) or [({"a": 1}, "a")])
    value = container[key]
    if rng.random() < 0.6 and key in known:  # a value that this key has elsewhere
        container[key] = copy.deepcopy(rng.choice(known[key]))
        return
    match rng.randrange(8):
        case 0 | 1:
            container[key] = odd(rng)
        case 2:
            del container[key]
        case 3 if isinstance(container, dict):
            container[_key(str(key), rng)] = container.pop(key)
        case 4 if isinstance(container, dict):
            container[_key(str(key), rng)] = odd(rng)
        case 5:
            other, at = rng.choice(places(data))
            container[key] = copy.deepcopy(other[at])
        case 6 if isinstance(value, int) and not isinstance(value, bool):
            container[key] = value * rng.choice((-1, 0, 2, 3, 10**3, 10**6, 10**12))
        case 7 if isinstance(value, list) and value:
            value += [copy.deepcopy(rng.choice(value)) for _ in range(rng.choice((1, 10, 300)))]
        case _:
            container[key] = [value] if rng.random() < 0.5 else {"kind": value}


def _key(key: str, rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(ODD_KEYS)
    letters, at = list(key), rng.randrange(len(key) + 1)
    letters[at : at + rng.randrange(2)] = [rng.choice(string.ascii_lowercase + "_.")] * rng.choice((0, 1, 1, 3, 500))
    return "".join(letters)


# -- mutations of text ------------------------------------------------------------------------------------------------


def garble(text: str, rng: random.Random) -> str:
    at, size = rng.randrange(len(text) + 1), rng.choice((1, 1, 5, 100))
    match rng.randrange(7):
        case 0:
            return text[:at] + text[at + size :]
        case 1:
            return text[:at] + rng.choice("{}[]\"'=,.:#\n\t \0\\0-1eé한\ud800\x85") * size + text[at:]
        case 2:
            return text[:at]
        case 3:
            return text[:at] + text[at : at + size] * rng.choice((2, 50)) + text[at + size :]
        case 4:
            lines = text.split("\n")
            rng.shuffle(lines)
            return "\n".join(lines)
        case 5:
            return text[:at] + "".join(chr(rng.randrange(32, 127)) for _ in range(size)) + text[at + size :]
        case _:
            return (
                text[:at]
                + rng.choice(("[[[" * 2000, "a." * 2000, '{"a":' * 2000, "9" * 5000, "0x" + "f" * 5000))
                + text[at:]
            )


def assignments(data: Any, known: dict[Any, list[Any]], rng: random.Random) -> list[str]:
    found = []
    for _ in range(rng.randint(1, 4)):
        steps, here = list[str](), data
        while isinstance(here, (dict, list)) and here and rng.random() < 0.9:
            key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
            steps.append("*" if isinstance(key, int) and rng.random() < 0.3 else str(key))
            here = here[key]
        if rng.random() < 0.3:
            steps.insert(rng.randrange(len(steps) + 1), _key(rng.choice(steps or ["depth"]), rng))
        try:
            chosen = (
                rng.choice(known[key]) if (key := (steps or [""])[-1]) in known and rng.random() < 0.6 else odd(rng)
            )
            value = json.dumps(chosen, ensure_ascii=False) if rng.random() < 0.8 else str(chosen)
        except (RecursionError, ValueError):
            value = "[" * 5000
        text = f"{'.'.join(steps)}={value}"
        found.append(garble(text, rng) if rng.random() < 0.2 else text)
    return found


# -- laws -------------------------------------------------------------------------------------------------------------


def case(specs: list[Spec], known: dict[Any, list[Any]], seed: int, number: int) -> str:
    rng = random.Random(f"{seed} {number}")
    spec = rng.choice(specs)
    cls, data = type(spec), io.to_data(spec)
    try:
        match number % 3:
            case 0:
                for _ in range(rng.choice((1, 1, 2, 5))):
                    mutate(data, known, rng)
                found = _read(cls, data, rng)
            case 1:
                format = rng.choice(("toml", "json"))
                text = io.dumps(spec, format)
                for _ in range(rng.choice((1, 1, 3))):
                    text = garble(text, rng)
                found = io.loads(cls, text, format)
            case _:
                found = io.override(spec, assignments(data, known, rng))
    except ConfigError as error:
        return told(error)
    if io.loads(cls, io.dumps(found)) != found:
        raise Broken("is not the same when it is read again")
    model = found if isinstance(found, ModelConfig) else found.model if isinstance(found, Recipe) else None
    return "read" if model is None else priced(model, rng)


def _read(cls: type[Spec], data: Any, rng: random.Random) -> Spec:
    """By way of a text, where the data has one."""
    write: Callable[[Any], str] = json.dumps if (is_json := rng.random() < 0.5) else tomli_w.dumps
    try:
        text = write(data)
    except (TypeError, ValueError, RecursionError, AttributeError):  # no text says this: a number of many digits, null
        return io.build(cls, data)
    return io.loads(cls, text, "json" if is_json else "toml")


def told(error: ConfigError) -> str:
    if not error.faults or not all(fault.message for fault in error.faults):
        raise Broken("is refused without a reason")
    if len(str(error)) > LONGEST:
        raise Broken(f"is refused in {len(str(error))} characters")
    str(error).encode()  # a terminal prints it
    return "refused"


def priced(model: ModelConfig, rng: random.Random) -> str:
    """Count a model, with a vocabulary where it has none; build some on the meta device, which allocates nothing."""
    try:
        model = with_vocabulary(model)
        table = count(model)
        training_memory(model)
    except ConfigError as error:
        told(error)
        return "read, not counted"
    try:
        check_model(model)
        word = "read and counted"
    except ConfigError as error:
        told(error)
        word = "read, beyond memory"
    deep = sum(stack.depth for stack in model.stacks.values()) > DEEPEST
    if deep or table.parameters > MOST_PARAMETERS or rng.random() > BUILT:
        return word
    with torch.device("meta"):
        built = sum(weight.numel() for weight in Transformer(model).parameters())
    if built != table.parameters:
        raise Broken(f"has {built:,} parameters, and {table.parameters:,} were counted")
    return "read, counted and built"


def with_vocabulary(model: ModelConfig) -> ModelConfig:
    """The model of a recipe, whose tokenizer is not known here."""
    inputs = {"source": model.source, "target": model.target}
    open_ones = {name: read for name, read in inputs.items() if isinstance(read, Tokens) and read.vocab is None}
    return model.model_copy(update={name: read.model_copy(update={"vocab": 1000}) for name, read in open_ones.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers, specs = range(given.first, given.first + given.cases), bases()
    if not run_cases(partial(case, specs, values_by_key(specs), given.seed), numbers, SECONDS, "configs"):
        sys.exit(1)
