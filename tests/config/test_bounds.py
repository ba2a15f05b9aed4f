"""Input of any size gives an error of bounded length, after a bounded number of calls."""

import json
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anyformer.config import ConfigError, Fault, ModelConfig, io
from anyformer.config.spec import close_to, did_you_mean
from tests.calls import CountedCalls

LONGEST = 5000  # characters of a message
FEW = 10_000  # calls, for an input of one line
MODEL = """
width = 64
tie = "output"
head = "lm"
target = { vocab = 100 }
[decoder]
depth = 2
[[decoder.blocks]]
[decoder.blocks.mixer]
heads = 4
"""


@contextmanager
def refused_within(calls: int) -> Iterator[list[str]]:
    """A `ConfigError` of bounded length after this many calls; its text is appended to the list."""
    found = list[str]()
    with CountedCalls() as counted, pytest.raises(ConfigError) as error:
        yield found
    assert counted.count < calls
    found.append(str(error.value))
    assert len(found[0]) <= LONGEST


def mixed(length: int) -> str:
    return (string.ascii_lowercase * (length // 26 + 1))[:length]


def test_a_long_unknown_key_is_refused_in_a_short_message() -> None:
    with refused_within(FEW) as told:
        io.loads(ModelConfig, f"{mixed(50_000)} = 1\n{MODEL}")
    assert "unknown key" in told[0]


def test_suggestions_for_long_words_take_few_calls() -> None:
    words = [mixed(n) for n in range(1000, 3000)]
    with CountedCalls() as counted:
        assert close_to(mixed(20_000), [mixed(20_000)[:-1], mixed(19_000)]) is None
        assert len(did_you_mean(mixed(20_000), words)) <= LONGEST
    assert counted.count < len(words)


def test_short_words_are_still_suggested() -> None:
    assert close_to("widht", ["width", mixed(5000)]) == "width"


def test_many_known_words_are_listed_in_part() -> None:
    assert did_you_mean("zzz", [f"column{i}" for i in range(1000)]).endswith("and 970 more")


def test_many_faults_are_counted_rather_than_listed() -> None:
    with refused_within(500_000) as told:
        io.loads(ModelConfig, "".join(f"width{i} = 1\n" for i in range(2000)) + MODEL)
    assert "1950 more faults" in told[0]


def test_the_text_of_an_error_is_bounded_and_its_faults_are_all_there() -> None:
    error = ConfigError(Fault(f"key.{i}", "is wrong") for i in range(10_000))
    assert len(error.faults) == 10_000
    assert len(str(error)) <= LONGEST
    shown = str(error).splitlines()
    assert shown[-1] == f"... and at least {10_000 - len(shown) + 1} more faults"


def test_one_fault_keeps_the_beginning_and_the_end() -> None:
    text = str(ConfigError([Fault("a" * 5000 + "z", "b" * 5000 + "y")]))
    assert text.startswith("aaa")
    assert text.endswith("bby")
    assert "az: bb" in text
    assert len(text) < 2500


def test_repeated_keys_of_a_large_object_are_found_in_linear_time() -> None:
    keys = [f"k{i}" for i in range(20_000)]
    text = "{" + ",".join(f'"{key}":1' for key in [*keys, "k7"]) + "}"
    with refused_within(2_000_000) as told:
        io.loads(ModelConfig, text, "json")
    assert told == ["k7: is given more than once"]


def test_a_number_too_long_to_write_is_refused() -> None:
    """Python reads hexadecimal numbers of any length, but writes none of more than 4,300 decimal digits."""
    with refused_within(FEW) as told:
        io.loads(ModelConfig, MODEL.replace("width = 64", f"width = 0x{'f' * 5000}"))
    assert told == ["width: is a whole number of 20,000 bits: must have at most 4096"]


@pytest.mark.parametrize("number", ["0x" + "f" * 500, "9" * 300, str(2**63)])
def test_a_size_of_more_than_64_bits_is_refused(number: str) -> None:
    with refused_within(FEW) as told:
        io.loads(ModelConfig, MODEL.replace("width = 64", f"width = {number}"))
    assert told[0].endswith("must be at most 9.22337e+18")


def test_many_wrong_blocks_are_refused() -> None:
    data = io.to_data(io.loads(ModelConfig, MODEL))
    data["decoder"]["blocks"] = [{"mixer": {"kind": "attention", "heads": i + 1}} for i in range(300)]
    data["widht"] = 1
    with refused_within(6_000_000):
        io.loads(ModelConfig, json.dumps(data), "json")


@pytest.mark.parametrize("index", ["1" * 5000, "٠", "００", "²"])
def test_an_element_of_a_list_is_an_ascii_number(index: str) -> None:
    with refused_within(FEW) as told:
        io.override(io.loads(ModelConfig, MODEL), [f"decoder.blocks.{index}.placement=post"])
    assert "known here: 0 or *" in told[0]


@pytest.mark.parametrize(
    "change", ["{0}=1", "width={0}", "decoder.position={{{0}", "{0}", "decoder.{0}.x=1", "width.{0}=1"]
)
def test_long_overrides_give_short_messages(change: str) -> None:
    with refused_within(FEW):
        io.override(io.loads(ModelConfig, MODEL), [change.format(mixed(20_000))])


@pytest.mark.parametrize(
    "text", ["a." * 40_000 + "a = 1", "x = {" + '"a" . ' * 20_000 + "a = 1}", "[" + "a." * 40_000 + "a]"]
)
def test_long_dotted_keys_are_refused_at_once(text: str) -> None:
    with refused_within(FEW) as told:
        io.loads(ModelConfig, text)
    assert told == ["nested too deeply"]


def test_dots_in_strings_and_comments_are_no_keys() -> None:
    dots = "a." * 200
    text = f'# {dots}\n{MODEL}\n[adapter]\nrank = 2\ntargets = [\'{dots}\', "{dots}", """{dots}\n{dots}"""]\n'
    with refused_within(150_000) as told:
        io.loads(ModelConfig, text)
    assert told[0].count("the blocks have no such linear layer") == 3


def test_a_file_too_large_for_a_config_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_bytes(b"# nothing\n" * 1_000_000)
    with refused_within(FEW) as told:
        io.load(ModelConfig, path)
    assert told == [f"{path}: is too large: a config has at most 8,388,608 bytes"]
