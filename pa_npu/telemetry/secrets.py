"""The one list of what is secret, and the one function that hides it, for whatever shows a run's configuration, arguments or logs.

A value is hidden by its name, where names are the user's own (environment variables, options), and
by its form: the password in a URL, what follows Bearer, X-Api-Key:, --api-key or TOKEN=, keys with
a known beginning. What is secret in a configuration is so in all texts of its run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "(not shown)"
Mask = Callable[[str], str]
# Below these the names are the user's; all others are this package's, and hold no secrets.
_OPEN = ("rollout.env", "environment.options", "data.template_options", "reward.judge.request")
_VARIABLES = "rollout.env"
# A name is secret where one of its words is or ends in one of these ...
_WORD = re.compile(
    ".*(?:password|passwd|passphrase|passcode|pwd|secret|credential|(?<!sa)cred|authorization|bearer|cookie|apikey|auth|webhook)s*"
)
# ... or its last word is one of these, or of those that are so common that they need a word before
# them.
_LAST = {"key", "token", "pass", "pw", "jwt", "dsn", "sas", "otp"}
_LAST_OF_SEVERAL = {"tok", "pat", "sig", "signature"}
# What stands before the last word tells what is none.
_NO_SECRET_BEFORE = re.compile(
    "n|pad|eos|bos|unk|stop|sep|mask|cls|per|max|min|num|image|video|audio|special|next|last|first|second|one|two|single|multi|"
    "score|question|answer|prompt|response|label|input|output|total|new|generated|gen|train|forward|backward|sort|group|cache|hash|"
    "dict|map|primary|foreign|partition|public|column|row|function|fn|method|glob|file|regex"
)
_NO_SECRETS = {"bypass", "compass", "pass", "token", "key"}
_SHORTEST_VALUE = 4  # of a value that is looked for in texts: a shorter one is found everywhere

_NAME_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])")
# A secret by its form is the last group that has matched.
_FORMS = [
    re.compile(pattern)
    for pattern in (
        # a URL's password, also one with @ or / in it; a port is none
        r"""(?<![\w+.-])\w[\w+.-]*://[^\s/@:]*:(?!\d{1,5}(?:[/?#,;)\]\s]|$))([^\s/"'<>]+|(?:(?!://)[^\s"'<>])+?)(?=@)""",
        # a token in place of a user
        r"(?<![\w+.-])\w[\w+.-]*://(?=[\w-]*\d)([\w-]{16,})(?=@)",
        r"""://(?:hooks\.[\w.-]+/(?:services/)?|[^\s/"']+/(?:\w+/)?webhooks?/(?=\S{0,200}\d))([^\s"'<>]+)""",
        r"[?&](?:sig|signature|code)=([^\s&#\"']+)",
        r"\b(?i:bearer)\s+(?!(?i:tokens?|auth\w*|scheme|headers?|keys?)\b)([\w.~+/=-]{4,})",
        r"\b(?i:basic)\s+(?=\S*(?:\d|=|[a-z][A-Z]))([\w+/=-]{8,})",
        r"\b((?:sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|nvapi-|gsk_|AKIA|ASIA|AIza)[\w-]{12,}|hf_[A-Za-z0-9]{16,}"
        r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----([\s\S]*?)(?=-----END|\Z)",
        # a user's password as programs take it
        r"""\bcurl\b[^\n|]{0,300}?[\s"'](?:-[uU]|--(?:proxy-)?user)(?:["'],)?[\s=]*(?:(["'])[^:"'\n]+:([^"'\n]+)|[^\s:"']+:([^\s"']+))""",
        r"""\b(?:sshpass\s+-p|redis-cli\b[^\n|]{0,300}?\s-a)\s*(?:"([^"\n]+)|'([^'\n]+)|([^\s"']+))""",
    )
]
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>\\*["']?[^\S\n]*(?:[:=]=?|=>)[^\S\n]*)"""
)
_OPTION = re.compile(
    r"""(?<![\w-])(?P<name>--?[A-Za-z][\w-]+)(?P<sign>[^\S\n]+|\\*["'],\s*(?=[b\\]*["']))(?![b\\]*["']?-)"""
)
# What stands behind a name: quoted, listed or bare. A bare one has , ; & inside, unless another
# name follows.
_VALUE = re.compile(
    r"""\\+(?P<mark>["'])(?P<escaped>.*?)\\+(?P=mark)
    | b?(?P<quote>["'])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\\n])*)
    | \[(?P<listed>(?:[^\[\]]|\[[^\[\]]*\]){0,2000})
    | \{(?P<mapped>(?:[^{}]|\{[^{}]*\}){0,2000})
    | (?P<bare>(?:[^\s"',;&\]})\\]|\\(?!["'])|[,;&"'\]})]+(?=\w)(?![\w.-]*["']?[:=]))+)""",
    re.VERBOSE,
)
_ITEM = re.compile(
    r"""(?:"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|(\(not shown[^)]*\)|[^\s"',:{}\[\]]+))(?P<is_key>\s*:)?"""
)
# These headers are secret to the end of the line, or to the next header, but for the scheme.
_WHOLE_LINE = ("authorization", "cookie")
_LINE = re.compile(
    r"""(?:(?:bearer|basic|token|digest|bot|apikey|key|oauth|negotiate|ntlm|[\w-]*hmac[\w-]*)[^\S\n]+)?
    (?P<line>[^\s"'\\\[{](?:[^"'\\\n]|="[^"\n]*")*?)(?=[^\S\n]*(?:(?<!=)["'\\\n]|\Z)|[^\S\n]+[A-Za-z][\w-]*:[^\S\n])""",
    re.VERBOSE | re.IGNORECASE,
)
_NOTHING = frozenset(("", "none", "null", "true", "false"))


@functools.lru_cache(4096)
def is_secret(name: str) -> bool:
    """Returns whether what has this name (one word of a dotted one, an option, a variable) is not
    to be shown.
    """
    words = [word.lower() for word in _NAME_SPLIT.split(name) if word]
    if words[-2:] == ["key", "id"]:
        words.pop()
    if not words or name == "PWD":  # a shell's working directory
        return False
    if any(map(_WORD.fullmatch, words)):
        return True
    before = words[-2] if len(words) > 1 else ""
    last = words[-1]
    if before in ("api", "access"):
        last = last.removesuffix("s")
    if last in _LAST or (before and last in _LAST_OF_SEVERAL):
        return not _NO_SECRET_BEFORE.fullmatch(before)
    return (
        last.endswith(("pass", "token", "key", "pw"))
        and last not in _NO_SECRETS
        and last.isalpha()
        and _is_glued(last)
    )


def _is_glued(word: str) -> bool:
    """PGPASS, HFTOKEN, MYKEY are; bypass, monkey and turkey are words."""
    return not word.endswith(("ypass", "mpass", "rpass", "onkey", "urkey", "ockey"))


class Secrets:
    """tree: the configuration with what is secret masked. config: its leaves by dotted name. hide:
    a text of the same run.
    """

    def __init__(self, tree: Mapping[str, Any], mask: Mask = lambda value: HIDDEN) -> None:
        self._found: set[str] = set()
        self._mask = mask
        self.tree = {key: self._shown(value, str(key)) for key, value in tree.items()}
        self.config = flat(self.tree)
        known = sorted(
            (value for value in self._found if len(value) >= _SHORTEST_VALUE), key=len, reverse=True
        )
        self._values = re.compile("|".join(map(re.escape, known))) if known else None

    def hide(self, text: str) -> str:
        """Returns the text without the configuration's secrets, and without what looks like one."""
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        return hide(text)

    def _shown(self, value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: self._shown(item, f"{name}.{key}") for key, item in value.items()}
        users = next(
            (name[len(prefix) :] for prefix in _OPEN if f"{name}.".startswith(f"{prefix}.")), None
        )
        if isinstance(value, list):  # in mappings of a list the names are the user's
            return list(self._items(value, _OPEN[0] if users is None else name))
        words = (users or "").split(".")
        # a shell's working directory is among variables, not among options
        is_password = not name.startswith(_VARIABLES) and any(
            word.lower() == "pwd" for word in words
        )
        if (
            (is_password or any(map(is_secret, words)))
            and not isinstance(value, bool)
            and value not in (None, "")
        ):
            return self._masked(str(value))
        if isinstance(value, str):
            self._found.update(value[start:end] for start, end in _secret_spans(value))
            return hide(value, self._mask)
        return value

    def _items(self, values: Sequence[Any], name: str) -> Iterator[Any]:
        """Arguments of a command: what follows the name of an option is its value, up to the next
        option.
        """
        is_value = False
        for value in values:
            is_option = isinstance(value, str) and value.startswith("-")
            is_value = isinstance(value, str) and is_value and not is_option
            yield self._masked(value) if is_value else self._shown(value, name)
            is_value = is_value or (is_option and "=" not in value and is_secret(value))

    def _masked(self, value: str) -> str:
        if value.startswith(HIDDEN[:-1]):
            return value
        self._found.add(value)
        return self._mask(value)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment without a secret: in their names, or in a value, such
    as a URL with a password.
    """
    return {
        name: value
        for name, value in environment.items()
        if not is_secret(name) and hide(value) == value
    }


def hide(text: str, mask: Mask = lambda value: HIDDEN) -> str:
    """Returns the text without what looks like a secret by its form."""
    shown = ""
    done = 0
    for start, end in _secret_spans(text):
        shown += text[done:start] + mask(text[start:end])
        done = end
    return shown + text[done:]


def _secret_spans(text: str) -> list[tuple[int, int]]:
    """Returns the spans of secrets in order, without those that are hidden already; overlapping
    spans are joined.
    """
    spans: list[tuple[int, int]] = []
    for start, end in sorted([*_by_form(text), *_by_name(text)]):
        if text.startswith(HIDDEN[:-1], start) or text[start:end].strip().lower() in _NOTHING:
            continue
        if spans and start < spans[-1][1]:
            start = spans[-1][0]
            end = max(end, spans.pop()[1])
        spans.append((start, end))
    return spans


def _by_form(text: str) -> Iterator[tuple[int, int]]:
    for pattern in _FORMS:
        yield from (match.span(match.lastindex or 0) for match in pattern.finditer(text))


def _by_name(text: str) -> Iterator[tuple[int, int]]:
    for pattern in (_NAMED, _OPTION):
        done = 0
        for match in pattern.finditer(text):
            name = match["name"].strip("-.").lower()
            is_plain = pattern is _NAMED and match["sign"][0] in ": \t"
            # in prose "pass: 3" and "key: x" are no secrets, "Authorization: x" and "api_key: x"
            # are
            if (
                match.start() < done
                or not is_secret(match["name"])
                or (is_plain and name in _NO_SECRETS)
            ):
                continue
            value = _LINE.match(text, match.end()) if name.endswith(_WHOLE_LINE) else None
            value = value or _VALUE.match(text, match.end())
            if value is None:
                continue
            kind = str(value.lastgroup)
            done = value.end()
            if kind in ("listed", "mapped"):
                items = _ITEM.finditer(text, *value.span(kind))
                yield from (
                    item.span(item.lastindex or 0) for item in items if item["is_key"] is None
                )
            else:
                yield value.span(kind)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name: {"run": {"seed": 1}} is {"run.seed": 1}.

    An empty section is a leaf.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
