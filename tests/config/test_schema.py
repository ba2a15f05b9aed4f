"""The JSON schema says what the grammar says."""

import re
from typing import Any

import pytest
from hypothesis import given

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.config.schema import meanings, nested_specs
from anyformer.recipe import MixturePart, Recipe, Seq2Seq
from tests.config.strategies import models


def fits(value: Any, node: dict[str, Any], root: dict[str, Any]) -> bool:
    """As much of JSON schema as ours uses; a keyword that is not known here fails the test."""
    types_of = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}

    def holds(keyword: str, given: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        match keyword:
            case "$ref":
                return fits(value, root["$defs"][given.removeprefix("#/$defs/")], root)
            case "anyOf":
                return any(fits(value, option, root) for option in given)
            case "oneOf":
                return sum(fits(value, option, root) for option in given) == 1
            case "enum":
                return value in given
            case "const":
                return value == given
            case "type" if given in ("integer", "number"):
                return number and (given == "number" or isinstance(value, int))
            case "type":
                return isinstance(value, types_of[given])
            case "minimum":
                return not number or value >= given
            case "exclusiveMinimum":
                return not number or value > given
            case "maximum":
                return not number or value <= given
            case "exclusiveMaximum":
                return not number or value < given
            case "items":
                return not isinstance(value, list) or all(fits(item, given, root) for item in value)
            case "prefixItems":
                return not isinstance(value, list) or all(map(fits, value, given, [root] * len(given)))
            case "minItems":
                return not isinstance(value, list) or len(value) >= given
            case "maxItems":
                return not isinstance(value, list) or len(value) <= given
            case "pattern":
                return not isinstance(value, str) or re.search(given, value) is not None
            case "minLength":
                return not isinstance(value, str) or len(value) >= given
            case "required":
                return not isinstance(value, dict) or set(given) <= value.keys()
            case "properties":
                return not isinstance(value, dict) or all(
                    fits(item, given[key], root) for key, item in value.items() if key in given
                )
            case "additionalProperties":
                assert given is False
                return not isinstance(value, dict) or value.keys() <= node["properties"].keys()
        assert keyword in ("$schema", "$defs", "title", "description", "default", "discriminator"), keyword
        return True

    return all(holds(keyword, given) for keyword, given in node.items())


SCHEMA = io.schema(ModelConfig)


@pytest.mark.parametrize("format", ["toml", "json"])
@given(config=models())
def test_the_schema_takes_what_is_written(format: io.Format, config: ModelConfig) -> None:
    assert fits(io.parse(io.dumps(config, format), format), SCHEMA, SCHEMA)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({"head": "lm"}, True),
        ({"head": "classifier"}, False),  # needs `labels`
        ({"head": "lmm"}, False),
        ({"head": {"bias": True}}, False),  # of which kind?
        ({"head": {"kind": "lm", "scale": "inv_sqrt_width"}}, True),
        ({"headd": "lm"}, False),
        ({"width": 0}, False),
        ({"decoder": {"depth": 2, "blocks": {"mixer": {"heads": 2, "pattern": "full"}}}}, True),
    ],
)
def test_the_schema_and_the_grammar_agree(change: dict[str, Any], right: bool) -> None:
    data = {
        "width": 8,
        "target": {"vocab": 9},
        "decoder": {"depth": 1, "blocks": [{"mixer": {"heads": 2}}]},
        **change,
    }
    assert fits(data, SCHEMA, SCHEMA) == right
    if right:
        io.build(ModelConfig, data)
    else:
        with pytest.raises(ConfigError):
            io.build(ModelConfig, data)


def test_the_schema_tells_what_things_are() -> None:
    assert SCHEMA["title"] == "ModelConfig"
    assert "The encoder reads" in SCHEMA["description"]
    assert "Su et al. 2021" in SCHEMA["$defs"]["Rotary"]["description"]
    assert SCHEMA["$defs"]["YarnScaling"]["required"] == ["factor", "original_length"]
    words = SCHEMA["$defs"]["Rotary"]["properties"]["scaling"]["oneOf"][-1]
    assert words == {"enum": ["none"]}, "every other scaling needs a factor"


def test_every_field_has_a_meaning() -> None:
    """The comment beside a field is its description in the schema; only `kind` needs none."""
    recipe = io.schema(Recipe)
    for name, spec in nested_specs(Recipe).items():
        properties = recipe["$defs"].get(name, recipe)["properties"]
        without = [field for field in spec.model_fields if field != "kind" and not properties[field].get("description")]
        assert not without, f"{spec.__module__}.{name}: add a comment beside {', '.join(without)}"
    assert recipe["$defs"]["Attention"]["properties"]["key_width"]["description"].endswith("None: d / heads")  # beside
    assert recipe["$defs"]["Data"]["properties"]["root"]["description"].startswith("folder of relative")  # above
    assert meanings(MixturePart)["beams"] == meanings(Seq2Seq)["beams"], "inherited"
