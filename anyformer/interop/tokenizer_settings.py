"""tokenizer_config.json and special_tokens_map.json of a folder: values of the right type, or a `ConfigError`."""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from anyformer.config import ConfigError
from anyformer.config.spec import visible
from anyformer.interop.weight_files import read_json, wrong

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMES = {bool: "true or false", int: "a whole number", str: "a string", list: "a list", dict: "a table"}
ORDER = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

T = TypeVar("T")


class Added(NamedTuple):
    """A token outside the vocabulary proper."""

    id: int
    token: str
    special: bool
    strips: bool  # takes spaces around it along, or matches whole words only


class Settings:
    """The settings of a tokenizer by key; tokenizer_config.json wins over special_tokens_map.json."""

    def __init__(self, folder: Path, defaults: dict[str, str] | None = None):
        self._folder, self._defaults = folder, defaults or {}
        found = {name: read_json(folder / name) for name in (SPECIAL, SETTINGS) if (folder / name).is_file()}
        self._given = {key: (value, name) for name, table in found.items() for key, value in table.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._given

    def __call__(self, key: str, kind: type[T], default: T) -> T:
        """Return a value of this type; the default where it is missing or null."""
        value = self._given[key][0] if key in self._given else None
        if value is None:
            return default
        if type(value) is not kind:
            raise self.wrong(key, f"must be {NAMES[kind]}")
        return value

    def holds(self, key: str, kind: type[Any]) -> bool:
        """Return whether a key has a value of this type."""
        return key in self._given and type(self._given[key][0]) is kind

    def token(self, key: str) -> str | None:
        """Return the text of a special token."""
        if key not in self._given:
            return self._defaults.get(key)
        value = self._given[key][0]
        return None if value is None else self._content(key, value)

    def special(self) -> list[str]:
        """Return the texts of all special tokens, in the order in which missing ones get ids."""
        named = [token for key in ORDER if (token := self.token(key)) is not None]
        more = [self._content("additional_special_tokens", one) for one in self("additional_special_tokens", list, [])]
        return list(dict.fromkeys(named + more))

    def added(self) -> list["Added"]:
        """Return the added tokens by rising id: `added_tokens_decoder`, or else those of added_tokens.json."""
        if self.added_in == ADDED and (self._folder / ADDED).is_file():
            return self._added_file(self._folder / ADDED)
        found = []
        for key, value in self("added_tokens_decoder", dict, {}).items():
            if not (key.isascii() and key.isdigit()) or len(key) > 9 or not isinstance(value, dict):
                raise self.wrong("added_tokens_decoder", "must be a table from ids to tables")
            flags = [value.get(name, False) for name in ("special", "lstrip", "rstrip", "single_word")]
            if not all(type(flag) is bool for flag in flags):
                raise self.wrong("added_tokens_decoder", f"{key}: special, lstrip, … must be true or false")
            found.append(Added(int(key), self._content("added_tokens_decoder", value), flags[0], any(flags[1:])))
        return sorted(found)

    @property
    def added_in(self) -> str:
        """The name of the file that `added` reads."""
        return SETTINGS if "added_tokens_decoder" in self._given else ADDED

    def _added_file(self, path: Path) -> list["Added"]:
        table, special = read_json(path), set(self.special())
        if not all(type(id) is int and id >= 0 for id in table.values()):
            raise wrong(path, "must be a table from tokens to ids")
        return sorted(Added(id, token, token in special, False) for token, id in table.items())

    def wrong(self, key: str, message: str) -> ConfigError:
        """Return an error that names the file, the key and its value."""
        value, name = self._given[key]
        shown = visible(repr(value))
        return wrong(self._folder / name, f"{key} = {shown if len(shown) < 80 else shown[:77] + '...'}: {message}")

    def _content(self, key: str, value: Any) -> str:
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise self.wrong(key, "must be the text of a token, or a table with its content")
        return text
