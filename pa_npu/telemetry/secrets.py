"""The one list of what is secret, and the one function that hides it, for whatever shows a run's configuration, arguments or logs.

A value is hidden by its name, where names are the user's own (environment variables, options), and by its form: the password in a
URL, what follows Bearer, --api-key or TOKEN=, keys with a known beginning. What is secret in a configuration is so in all texts of
its run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "(not shown)"
# Below these the names are the user's; all others are this package's, and hold no secrets.
_OPEN = ("rollout.env", "environment.options", "data.template_options")
# A name is secret where one of its words is or ends in one of these ...
_WORDS = (
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "credential",
    "authorization",
    "bearer",
    "cookie",
    "apikey",
    "auth",
)
# ... or its last word is one of these; what stands before tells what is none.
_LAST = {"key", "token", "pass", "jwt", "dsn", "sas"}
_NO_SECRET_BEFORE = re.compile(
    "pad|eos|bos|unk|stop|sep|mask|cls|per|max|min|num|image|special|next|first|score|answer|sort|group|cache|primary"
)
_NO_SECRETS = frozenset({"bypass", "compass", "pass", "token", "key"})
_SHORTEST_VALUE = 4  # of a value that is looked for in texts: a shorter one is found everywhere

_NAME_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])")
_URL = re.compile(r"(\w[\w+.-]*://[^\s/@:]*:)([^\s/@]+)(?=@)")
_SCHEME = re.compile(r"\b(Bearer|Basic)(\s+)([\w.~+/=-]{4,})", re.IGNORECASE)
_KNOWN = re.compile(r"\b(?:sk-|hf_|gh[pousr]_|glpat-|xox[abprs]-|AKIA|AIza)[\w-]{12,}")
_FLAG = re.compile(r"(?P<name>--[A-Za-z][\w-]*)(?P<sign>[= ]+)(?P<value>[^\s\"',\]]+)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?P<sign>=[\"']?|[\"']\s*:\s*\[?[\"']?)(?P<value>[^\s\"',\]}&;]+)")
_HEADER = re.compile(r"(?P<name>[A-Za-z][\w-]*)(?P<sign>: *)(?!Bearer |Basic )(?P<value>[^\s\"',\]}&;]+)")


def is_secret(name: str) -> bool:
    """Whether what has this name (one word of a dotted one, an option, a variable) is not to be shown."""
    words = [word.lower() for word in _NAME_SPLIT.split(name) if word]
    if not words or words == ["pwd"]:  # a shell's working directory
        return False
    if any(word.rstrip("s").endswith(_WORDS) for word in words):
        return True
    last = words[-1].removesuffix("s") if words[-1] == "keys" and len(words) > 1 and words[-2] == "api" else words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last in _LAST:
        return not _NO_SECRET_BEFORE.fullmatch(before)
    return last.endswith(("pass", "token", "key")) and last not in _NO_SECRETS and last.isalpha() and _is_glued(last)


def _is_glued(word: str) -> bool:
    """PGPASS, HFTOKEN, MYKEY are; bypass, monkey and turkey are words."""
    return not word.endswith(("ypass", "mpass", "rpass", "onkey", "urkey", "ockey"))


class Secrets:
    """config: leaves of the tree by dotted name, with what is secret hidden. hide: a text of the same run."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._found: set[str] = set()
        self.config = {name: self._leaf(name, value) for name, value in flat(tree).items()}
        known = sorted((value for value in self._found if len(value) >= _SHORTEST_VALUE), key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, known))) if known else None

    def hide(self, text: str) -> str:
        """The text without the configuration's secrets, and without what looks like one."""
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        return hide(text)

    def _leaf(self, name: str, value: Any) -> Any:
        users = next((name[len(prefix) + 1 :] for prefix in _OPEN if name.startswith(f"{prefix}.")), "")
        if any(map(is_secret, users.split("."))) and not isinstance(value, bool) and value not in (None, "", [], {}):
            self._found.update(map(str, value if isinstance(value, list) else [value]))
            return HIDDEN
        return self._shown(value)

    def _shown(self, value: Any) -> Any:
        if isinstance(value, str):
            shown = hide(value)
            self._found.update(_hidden_parts(value))
            return shown
        if isinstance(value, list):
            return list(self._items(value))
        if isinstance(value, Mapping):
            return {key: self._leaf(f"{_OPEN[0]}.{key}", item) for key, item in value.items()}
        return value

    def _items(self, values: Sequence[Any]) -> Iterator[Any]:
        """Arguments of a command: what follows the name of an option is its value."""
        is_value = False
        for value in values:
            if is_value and isinstance(value, str) and not value.startswith("--"):
                self._found.add(value)
                yield HIDDEN
            else:
                yield self._shown(value)
            is_value = isinstance(value, str) and value.startswith("--") and "=" not in value and is_secret(value)


def hide(text: str) -> str:
    """The text without what looks like a secret by its form."""
    text = _URL.sub(rf"\1{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    text = _KNOWN.sub(HIDDEN, text)
    for pattern in (_FLAG, _ASSIGNED):
        text = pattern.sub(_assigned, text)
    return _HEADER.sub(lambda found: _assigned(found) if is_header(found["name"]) else found[0], text)


def is_header(name: str) -> bool:
    """In prose "pass: 3" and "key: x" are no secrets, "Authorization: x" and "password: x" are."""
    return is_secret(name) and any(word.endswith(_WORDS) for word in _NAME_SPLIT.split(name.lower()))


def _assigned(found: re.Match[str]) -> str:
    if not is_secret(found["name"]) or found["value"].startswith(HIDDEN[:4]):
        return found[0]
    return f"{found['name']}{found['sign']}{HIDDEN}"


def _hidden_parts(text: str) -> Iterator[str]:
    for pattern, group in ((_URL, 2), (_SCHEME, 3), (_KNOWN, 0)):
        yield from (found[group] for found in pattern.finditer(text))
    yield from (
        found["value"] for pattern in (_FLAG, _ASSIGNED) for found in pattern.finditer(text) if is_secret(found["name"])
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name: {"run": {"seed": 1}} is {"run.seed": 1}. An empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
