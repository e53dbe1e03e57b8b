"""One file of another system on its way to ours: what of it is left, and what has become of the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from pa_npu.config.keys import all_keys, find_annotation
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.telemetry.secrets import flat
from tools.foreign.names import RELATED, SAME, Origin

# What a tree needs before a key of it can be judged by itself.
_REQUIRED = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}


@dataclass
class Imported:
    """A translation. values: our dotted keys. The others are lines about their names and about our
    keys.

    untranslated: their keys, in order, with the reason or the remedy.
    adapted: our keys that say something else than theirs did, with what and why.
    read_any: whether the file had any key that its system has.
    """

    values: dict[str, Any] = field(default_factory=dict)
    untranslated: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, str] = field(default_factory=dict)
    read_any: bool = False

    def tree(self) -> dict[str, Any]:
        """Returns the values as a configuration file has them."""
        tree: dict[str, Any] = {}
        for name, value in self.values.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return tree


@dataclass(frozen=True)
class Extent:
    """What a file may leave open: how many devices the run has, and how many rows its training
    data.
    """

    devices: int | None = None
    rows: int | None = None


NO_EXTENT = Extent()


class Translation:
    """The settings of one file. What a translator takes is gone; what nobody took is listed by
    `finish`.

    References to other keys (OmegaConf's `${...}` and `???`) count as not given. unread: names
    whose value could not be read.
    """

    def __init__(
        self,
        origin: Origin,
        parsed: Mapping[str, Any],
        unread: Mapping[str, str] | None = None,
        extent: Extent = NO_EXTENT,
    ) -> None:
        self.left = {
            name: value for name, value in flat(parsed).items() if not _is_reference(name, value)
        }
        self.given_names = frozenset(self.left)
        self.origin = origin
        self.unread = dict(unread or {})
        self.extent = extent
        self.done = Imported()
        self._names: dict[str, str] = {}  # of theirs, by the key of ours that came from it

    @property
    def values(self) -> dict[str, Any]:
        """Our keys so far."""
        return self.done.values

    def take(self, name: str) -> Any:
        """Returns a value that its taker translates; None where it is not given."""
        return self.left.pop(name, None)

    def take_number(self, name: str) -> Any:
        """Returns a number that is not negative; None where it is not given.

        Raises ConfigError for anything else.
        """
        value = self.take(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or value < -1
        ):
            raise ConfigError(f"{name}: {value!r} is not a number; correct it")
        return value

    def take_count(self, name: str) -> int | None:
        """Returns a whole number above 0; None where it is not given.

        Raises ConfigError for anything else.
        """
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {value!r} is no whole number above 0; correct it")
        return value

    def take_all(self, prefix: str) -> dict[str, Any]:
        """Takes every name that begins so; returns the values by the rest of their names."""
        names = [name for name in self.left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.take(name) for name in names}

    def set(self, ours: str, value: Any, name: str | None = None) -> None:
        """Gives a key of ours a value. name: theirs that it came from."""
        self.done.values[ours] = value
        if name is not None:
            self._names[ours] = name

    def lose(self, name: str, value: Any, why: str) -> None:
        """Lists a key of theirs that has no translation."""
        self.done.untranslated[name] = f"{value!r}: {why}"

    def adapt(self, ours: str, value: Any, why: str) -> None:
        """Gives a key of ours a value that is not what theirs said."""
        self.set(ours, value)
        self.done.adapted[ours] = f"{value}: {why}"

    def choose(self, name: str, ours: str, choices: Mapping[Any, Any]) -> None:
        """Translates a value that is called otherwise here; None among the choices is what is so
        anyway.
        """
        value = self.take(name)
        if value is None:
            return
        if not isinstance(value, (str, int, float, bool)) or value not in choices:
            return self.lose(name, value, f"has no counterpart; see {ours}")
        if choices[value] is not None:
            self.set(ours, choices[value], name)

    def ignore(self, *names: str) -> None:
        """Takes what needs no translation."""
        for name in names:
            self.take(name)

    def copy_same(self) -> None:
        """Sets what means the same there and takes the same values."""
        for name, ours in SAME[self.origin].items():
            if (value := self.take(name)) is not None:
                self.set(ours, value, name)

    def list_left(self, not_needed: re.Pattern[str]) -> None:
        """Lists what nobody took, but for what is not needed."""
        known = SAME[self.origin].keys() | RELATED[self.origin].keys()
        names = self.given_names | self.unread.keys()
        self.done.read_any = not names.isdisjoint(known)
        for name, value in self.left.items():
            if not_needed.match(name) or value is None:
                continue
            related = RELATED[self.origin].get(name)
            self.lose(
                name, value, f"not translated; see {related}" if related else "no counterpart here"
            )
        for name, why in self.unread.items():
            ours = (SAME[self.origin] | RELATED[self.origin]).get(name)
            self.done.untranslated[name] = f"{why}; set {ours}" if ours else why

    def check_values(self) -> None:
        """Raises ConfigError where a value cannot be that of its key, by the name that it has in
        their file.
        """
        types = {key.name: key.type for key in all_keys()}
        for ours, value in list(self.values.items()):
            if find_annotation(tuple(ours.split("."))) is str and not isinstance(
                value, (str, dict, list)
            ):
                value = self.values[ours] = str(value)  # a run that is called 7
            if _is_allowed(ours, value):
                continue
            name = self._names.get(ours, ours)
            raise ConfigError(f"{name}: {value!r} is not allowed; {ours} takes {types[ours]}")


def _is_reference(name: str, value: Any) -> bool:
    """Returns whether it is OmegaConf's own: the class of a section, another key's value, a value
    that is to be given.
    """
    return name.endswith("_target_") or (isinstance(value, str) and value.startswith(("${", "???")))


def _is_allowed(ours: str, value: Any) -> bool:
    """Returns whether a key takes the value, whatever the others say."""
    section, _, key = ours.partition(".")
    tree: dict[str, Any] = {name: dict(keys) for name, keys in _REQUIRED.items()}
    tree.setdefault(section, {})[key] = value
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return all(
            detail["loc"][:2] != (section, key) for detail in error.errors(include_url=False)
        )
    return True
