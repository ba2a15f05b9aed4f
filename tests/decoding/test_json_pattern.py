r"""A JSON Schema `pattern` is searched for in the string, with ^ and $ at the ends of each alternative."""

import json
import re
from itertools import product

import pytest

from anyformer.config import ConfigError
from anyformer.generation.constraints.text_constraint import JsonSchema, Vocabulary

LETTERS = "abx^$"
VOCABULARY = Vocabulary([*(bytes([n]) for n in range(256)), b""], stop=[256])


PATTERNS = [
    "^(a|b)$", "^(?:a|b)$", "(a|b)$", "^(a|b)", "(a|b)", "^(?P<one>ab|x)$", "^((a|b))$", "^(a|b)(x|a)$", "^(a)$",
    "^a|b$", "a|^b", "^a$|^b$", "^$", "^", "$", "", "|", "^|a$", "a||b$", r"a\$", r"^\^$", r"[$^]$", r"(a|\$)$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_python_searches(pattern: str):
    ours = JsonSchema({"type": "string", "pattern": pattern}, VOCABULARY)
    python = re.compile(re.sub(r"(?<![\\\[])\$", r"\\Z", pattern))  # Python's $ also stands before a last \n
    for length in range(4):
        for text in map("".join, product(LETTERS, repeat=length)):
            assert ours.accepts(list(json.dumps(text).encode())) == bool(python.search(text)), text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(^a)", r"character 2: \^ is an anchor"),
        ("a$b", r"character 2: \$ is an anchor"),
        ("a^", r"character 2: \^ is an anchor"),
        ("^*", r"character 2: \* has nothing to repeat"),
        ("a$*", r"character 2: \$ is an anchor"),
        ("^a)$", r"character 3: a \) without its \("),
        ("^(a", r"character 2: a \( without its \)"),
    ],
)
def test_what_is_refused(pattern: str, message: str):
    with pytest.raises(ConfigError, match=rf"^schema\.pattern: .*{message}"):
        JsonSchema({"type": "string", "pattern": pattern}, VOCABULARY)
