"""Reads the arguments of a training command from a shell script, without running it.

verl's overrides and the options of TRL's command line are read. Variables, arrays, defaults
(`${NAME:-16}`), integer arithmetic and line continuations are followed as bash does. A variable
that the script does not set is the environment's. What only running could tell, such as a command's
output or a variable that a condition sets, is named.
"""

from __future__ import annotations

import ast
import math
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from pa_npu.config.yaml_source import read_value, read_yaml
from pa_npu.errors import ConfigError
from tools.foreign.names import Origin

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPENING = ("if", "for", "while", "until", "case", "select")
_CLOSING = ("fi", "done", "esac")
_BEFORE_ASSIGNMENTS = (
    "export",
    "declare",
    "typeset",
    "readonly",
    "local",
    "then",
    "else",
    "do",
    "{",
)
_COMMAND: dict[Origin, re.Pattern[str]] = {
    "verl": re.compile(r"(^|[./])(main_\w+|\w+_main|\w*sft_trainer\w*)(\.py)?$"),
    "trl": re.compile(r"^(grpo|rloo|dpo|sft|kto|reward)$|\.py$"),
}
# Programs of these systems that train otherwise, or do not train.
_OTHER_PROGRAMS = re.compile(
    r"(^|[./])(main_(?:generation\w*|eval\w*)|kto\w*|reward\w*|ppo\w*|bco|cpo|orpo|prm)(\.py)?$"
)
_TRAINERS = {
    "rloo": "RLOO",
    "async_grpo": "AsyncGRPO",
    "online_dpo": "OnlineDPO",
    "dpo_online": "OnlineDPO",
    "sft": "SFT",
    "dpo": "DPO",
    "gkd": "GKD",
}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
# Options of accelerate, torchrun and deepspeed that say how many processes a node, and how many
# nodes, take part.
_PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
_NODES = ("num_machines", "nnodes", "num_nodes")
_OPERATORS: dict[type, Callable[[Any, Any], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(Fraction(left, right)),  # towards zero, as in C
    ast.Mod: lambda left, right: int(math.fmod(left, right)),
}
_WHOLE = "\1"  # a space at which no word ends
# in a text: where something unknown stands, by its number in _Script.unknown
_UNKNOWN = re.compile("\0([0-9]+)\0")


@dataclass
class Arguments:
    """values: by their names for them. unread: names whose value could not be read, with the
    reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def read_script(text: str, origin: Origin, where: str) -> Arguments:
    """Reads the arguments of the one training command in the script.

    Raises:
        ConfigError: where there is no such command, more than one, or one that trains in another
        way.
    """
    script = _Script(text)
    commands = script.commands()
    starts = []
    for number, (line, words) in enumerate(commands):
        begin = next((at for at, word in enumerate(words) if _COMMAND[origin].search(word)), None)
        if begin is not None and (words[begin + 1 :] or _starts_training(words, begin)):
            starts.append((number, line, begin))
    example = {
        "verl": "python3 -m verl.trainer.main_ppo KEY=VALUE ...",
        "trl": "trl grpo --NAME VALUE ...",
    }[origin]
    if not starts:
        raise ConfigError(
            f"{where}: no training command with arguments is in it, such as `{example}`; give the "
            "script that has it"
        )
    ours = [
        entry for entry in starts if not _OTHER_PROGRAMS.search(commands[entry[0]][1][entry[2]])
    ]
    if not ours:
        _, line, begin = starts[0]
        program = commands[starts[0][0]][1][begin]
        raise ConfigError(
            f"{where}: line {line} starts {program}, which is not translated; see "
            "docs/names.md for what is"
        )
    if len(ours) > 1:
        lines = ", ".join(str(line) for _, line, _ in ours)
        raise ConfigError(
            f"{where}: training commands begin at lines {lines}; give a script with one of them"
        )
    number, _, begin = ours[0]
    words = commands[number][1]
    arguments = Arguments()
    if origin == "trl":
        _read_launcher(arguments, script, number, words[:begin], words[begin], where)
        _read_served(arguments, commands)
    pairs = _overrides(words[begin + 1 :]) if origin == "verl" else _options(words[begin + 1 :])
    if origin == "verl":
        arguments.values.update(_configured(words[begin + 1 :], where))
    _read_pairs(arguments, script, pairs, where)
    return arguments


def _starts_training(words: list[str], begin: int) -> bool:
    """Returns whether a program without arguments is started by a launcher of training."""
    return any(
        word.rpartition("/")[2] in ("accelerate", "torchrun", "deepspeed") for word in words[:begin]
    )


def _read_pairs(
    arguments: Arguments, script: _Script, pairs: list[tuple[str, str | list[str]]], where: str
) -> None:
    for name, value in pairs:
        texts = [value] if isinstance(value, str) else value
        reasons = [
            script.unknown[int(number)]
            for part in (name, *texts)
            for number in _UNKNOWN.findall(part)
        ]
        if reasons:
            arguments.unread[_UNKNOWN.sub("...", name)] = reasons[0]
            continue
        parsed = [_value(part, where) for part in texts]
        arguments.values.pop(name, None)
        arguments.values[name] = parsed[0] if isinstance(value, str) else parsed


def _read_launcher(
    arguments: Arguments, script: _Script, number: int, before: list[str], program: str, where: str
) -> None:
    """Reads how many devices train, from the launcher before the program, and what the program
    itself says, if it is here.
    """
    directory = Path(where).parent
    file = next(
        (
            path
            for path in (directory / program, Path(program))
            if path.suffix == ".py" and path.is_file()
        ),
        None,
    )
    if file is not None and re.search(
        r"\w+Config\(", text := file.read_text(encoding="utf-8", errors="replace")
    ):
        from tools.foreign.program import read_program

        read = read_program(text, str(file))
        arguments.values.update(read.values)
        arguments.unread.update(read.unread)
    trainer = _TRAINERS.get(Path(program).stem)
    if trainer is not None:
        arguments.values["trainer"] = trainer
    options = dict(_options(before))
    if (config := options.get("config_file")) and isinstance(config, str):
        options = {**_accelerate(config, directory), **options}
    counts = {
        unit: next(
            (int(str(options[name])) for name in names if str(options.get(name, "")).isdigit()),
            None,
        )
        for unit, names in (("processes", _PROCESSES), ("nodes", _NODES))
    }
    processes = counts["processes"]
    nodes = counts["nodes"] or 1
    if processes is not None and not any(
        name in options for name in ("nproc_per_node", "nproc-per-node", "num_gpus")
    ):
        # accelerate counts those of all nodes
        nodes_of_all = nodes
        processes = max(1, processes // nodes)
        nodes = nodes_of_all
    if processes is None and (visible := script.visible[number]):
        processes = len([name for name in visible.split(",") if name.strip()])
    if processes is not None:
        arguments.values |= {"num_processes": processes * nodes, "devices_per_node": processes}
    elif before and before[0].rpartition("/")[2] in ("accelerate", "deepspeed", "torchrun", "trl"):
        arguments.values["starts_on_all_devices"] = True


def _accelerate(name: str, directory: Path) -> dict[str, Any]:
    """Returns the settings of accelerate's file, where it is here."""
    for path in (directory / name, Path(name)):
        if path.is_file():
            return {
                key: value
                for key, value in read_yaml(str(path))[0].items()
                if not isinstance(value, dict)
            }
    return {}


def _read_served(arguments: Arguments, commands: list[tuple[int, list[str]]]) -> None:
    """Reads the sizes of the engines that `trl vllm-serve` or `vllm serve` starts in the same
    script.
    """
    for _, words in commands:
        at = next((n for n, word in enumerate(words) if word == "vllm-serve"), None)
        if at is None:
            at = next(
                (
                    n
                    for n, word in enumerate(words[1:], 1)
                    if word == "serve" and words[n - 1].endswith("vllm")
                ),
                None,
            )
        if at is None:
            continue
        arguments.values["vllm_serve"] = True
        sizes = {
            "tensor_parallel_size": "tensor_parallel_size",
            "data_parallel_size": "data_parallel_size",
        }
        for name, value in _options(words[at + 1 :]):
            if name in sizes and str(value).isdigit():
                arguments.values[f"vllm_serve.{name}"] = int(str(value))


def _configured(words: list[str], where: str) -> dict[str, Any]:
    """Returns what Hydra's --config-path and --config-name say, where that file is here and none of
    verl's own.
    """
    named = dict(_hydra_options(words))
    name = named.get("config-name", "").removesuffix(".yaml")
    for directory in (
        Path(where).parent / named.get("config-path", ""),
        Path(named.get("config-path", "")),
    ):
        path = directory / f"{name}.yaml"
        if name and path.is_file():
            return dict(read_yaml(str(path))[0])
    return {}


def _hydra_options(words: list[str]) -> list[tuple[str, str]]:
    """Returns the options of Hydra itself, `--name=value` and `--name value`."""
    options = []
    for number, word in enumerate(words):
        name, sign, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in ("config-name", "config-path"):
            options.append((name, value if sign else "".join(words[number + 1 : number + 2])))
    return options


def _overrides(words: list[str]) -> list[tuple[str, str | list[str]]]:
    """Hydra's `key=value`, `+key=value` and `++key=value`; `--config-name` says which of verl's
    configurations they change.
    """
    pairs: list[tuple[str, str | list[str]]] = []
    for number, word in enumerate(words):
        if word.startswith("--config-name") and "megatron" in " ".join(words[number : number + 2]):
            pairs.append(("actor_rollout_ref.actor.strategy", "megatron"))
        if word.startswith("--config-name") and re.search(
            "multi_?turn", " ".join(words[number : number + 2])
        ):
            pairs.append(("actor_rollout_ref.rollout.multi_turn.enable", "true"))
        name, sign, value = word.lstrip("+").partition("=")
        if sign and not name.startswith("-"):
            pairs.append((name, value))
        elif _UNKNOWN.search(word) and not word.startswith("--config-"):
            pairs.append((word, ""))
    return pairs


def _options(words: list[str]) -> list[tuple[str, str | list[str]]]:
    """`--name value`, `--name=value`, `--name a b`, and `--name` alone, which is true."""
    pairs: list[tuple[str, str | list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            pairs.append((name.replace("-", "_"), value if sign else []))
        elif pairs:
            before = pairs[-1][1]
            pairs[-1] = (pairs[-1][0], [*([before] if isinstance(before, str) else before), word])
    single: dict[int, str] = {0: "true"}
    return [
        (
            name,
            value
            if isinstance(value, str) or len(value) > 1
            else single.get(len(value), "".join(value)),
        )
        for name, value in pairs
    ]


def _value(text: str, where: str) -> Any:
    """Returns a scalar, list or mapping as Hydra writes them, which is YAML but for `{a:b}`;
    anything else is text.
    """
    if text.startswith("{"):
        text = re.sub(r"""([\w"']):(?=\S)""", r"\1: ", text)
    try:
        return read_value(text, where)
    except ConfigError:
        return text


class _Script:
    """A script on its way: its variables so far, and what of it nobody can know without running it."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.depth = 0
        self.variables: dict[str, list[str]] = {}
        self.unknown: list[str] = []
        self.visible: list[
            str
        ] = []  # devices that each command sees, as the variable names them; empty where none does

    def commands(self) -> list[tuple[int, list[str]]]:
        """Line and words of each command, in order; assignments are made on the way."""
        commands: list[tuple[int, list[str]]] = []
        words: list[str] = []
        # values of variables that are set for one command alone
        before: dict[str, list[str] | None] = {}
        line = 1
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "#":
                self._comment()
            elif here in "\n;&|()":
                self.at += 1
                if words:
                    commands.append((line, words))
                    self._end_command(before)
                words = []
                before = {}
            elif here in "<>":
                self._redirection()
                words = words[:-1] if words and words[-1].isdigit() else words
            elif here.isspace() or self.text.startswith("\\\n", self.at):
                self.at += 1 if here.isspace() else 2
            elif not words and (assigned := _ASSIGNMENT.match(self.text, self.at)):
                before.setdefault(assigned[1], self.variables.get(assigned[1]))
                self._assign(assigned[1], bool(assigned[2]), assigned.end())
            else:
                line = line if words else self._line()
                words += self._word()
                if words and len(words) == 1:
                    self.depth += (words[0] in _OPENING) - (words[0] in _CLOSING)
                    if words[0] == "for" and (loop := _NAME.search(self.text, self.at)):
                        self.variables[loop[0]] = [
                            self._unknown(f"line {line}: `{loop[0]}` takes several values")
                        ]
                    words = [] if words[0] in _BEFORE_ASSIGNMENTS else words
        if words:
            commands.append((line, words))
            self._end_command(before)
        return commands

    def _end_command(self, before: dict[str, list[str] | None]) -> None:
        """Notes which devices a command sees, and takes back what was set for it alone."""
        values = ["".join(self.variables.get(name, [])) for name in _VISIBLE]
        visible = next(filter(None, values), "")
        self.visible.append("" if _UNKNOWN.search(visible) else visible)
        for name, value in before.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _comment(self) -> None:
        if self.text.startswith("#", self.at):
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end

    def _unknown(self, reason: str) -> str:
        self.unknown.append(f"{reason}; it cannot be read without running the script")
        return f"\0{len(self.unknown) - 1}\0"

    def _assign(self, name: str, further: bool, begin: int) -> None:
        line = self._line()
        self.at = begin
        if is_array := self.text.startswith("(", begin):
            self.at = begin + 1
            value = []
            while self.at < len(self.text) and self.text[self.at] != ")":
                before = self.at
                self._comment()
                value += self._word()
                self.at += self.at == before  # a space, or what is no part of a word
            self.at += 1
        else:
            value = [" ".join(self._word(split=False))]
        if further:
            earlier = self.variables.get(name, [])
            value = [*earlier, *value]
            if not is_array:
                value = ["".join(value)]
        if self.depth:
            value = [
                self._unknown(f"line {line}: `{name}` is set where a condition or a loop decides")
            ]
        self.variables[name] = value

    def _redirection(self) -> None:
        document = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n").match(self.text, self.at)
        if document and not self.text.startswith("<<<", self.at):
            end = re.compile(rf"^\s*{document[2]}$", re.MULTILINE).search(self.text, document.end())
            self.at = end.end() if end else len(self.text)
            return
        self.at = re.compile(r"[<>&| \t]+").match(self.text, self.at).end()  # type: ignore[union-attr]
        if self.at < len(self.text) and self.text[self.at] not in "\n;#()":
            self._word()

    def _word(self, split: bool = True) -> list[str]:
        """Returns the words that one word of the text becomes: none or several where it expands
        without quotes.
        """
        words = [""]
        quoted = False
        while self.at < len(self.text):
            here = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif here.isspace() or here in ";&|<>()":
                break
            elif here == "\\":
                words[-1] += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif here == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                words[-1] += self.text[self.at + 1 : end]
                self.at = end + 1
                quoted = True
            elif here == '"':
                self.at += 1
                parts = self._quoted()
                words[-1] += parts[0] if parts else ""
                words += parts[1:]
                quoted = quoted or bool(parts)
            elif here in "$`":
                value = " ".join(self._expansion())
                parts = value.split() if split else [value]
                words[-1] += parts[0] if parts else ""
                words += parts[1:]
            else:
                words[-1] += here
                self.at += 1
        return [word.replace(_WHOLE, " ") for word in words] if quoted or words != [""] else []

    def _quoted(self) -> list[str]:
        """Returns a text in double quotes, from behind the first: several words where an array is
        in it, none for an empty array.
        """
        words = [""]
        empty = False
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                words[-1] += self.text[self.at + 1].strip("\n")
                self.at += 2
            elif here in "$`":
                parts = self._expansion()
                empty = empty or not parts
                words[-1] += parts[0] if parts else ""
                words += parts[1:]
            else:
                words[-1] += here
                self.at += 1
        self.at += 1
        return [] if empty and words == [""] else words

    def _expansion(self) -> list[str]:
        """Expands `$...`, from the dollar or the backtick on."""
        begin = self.at
        line = self._line()
        if self.text.startswith("$((", begin):
            return [self._arithmetic(self._until("(", ")", begin + 1), line)]
        if self.text[begin] == "`" or self.text.startswith("$(", begin):
            inner = (
                self._until("`", "`", begin)
                if self.text[begin] == "`"
                else self._until("(", ")", begin + 1)
            )
            if inner.split() == ["pwd"]:
                return [os.getcwd()]
            return [self._unknown(f"line {line}: the output of `{' '.join(inner.split())[:60]}`")]
        if self.text.startswith("${", begin):
            return self._parameter(self._until("{", "}", begin + 1), line)
        if named := _NAME.match(self.text, begin + 1):
            self.at = named.end()
            return self._variable(named[0], line)
        self.at = begin + 2
        return self._special(self.text[begin + 1 : begin + 2], line)

    def _until(self, opening: str, closing: str, begin: int) -> str:
        """Returns the text between a bracket at `begin` and its partner, behind which reading goes
        on.
        """
        depth = 1
        end = begin
        while depth and end + 1 < len(self.text):
            end += 1
            depth += (self.text[end] == opening and opening != closing) - (
                self.text[end] == closing
            )
        self.at = end + 1
        return self.text[begin + 1 : end]

    def _special(self, sign: str, line: int) -> list[str]:
        if sign in "@*":
            return []  # arguments of the script itself, of which there are none
        if sign and sign in "0123456789?$!#-":
            return [self._unknown(f"line {line}: ${sign} is given when the script is run")]
        return [f"${sign}"]

    def _variable(self, name: str, line: int) -> list[str]:
        if name in self.variables:
            return self.variables[name]
        if name in os.environ:
            return [os.environ[name]]
        return [
            self._unknown(
                f"line {line}: ${name} is set neither in the script nor in the environment"
            )
        ]

    def _parameter(self, inner: str, line: int) -> list[str]:
        """`${...}`: a name, an array, or a name with what stands in for it where it is unset or
        empty.
        """
        form = re.fullmatch(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*)|(:\d+))?", inner, re.DOTALL)
        if form is None:
            return [self._unknown(f"line {line}: ${{{inner[:60]}}} changes a text")]
        name, _, sign, replacement, _ = form.groups()
        if name in "@*":
            return []
        value: list[str] | None = self.variables.get(
            name, [os.environ[name]] if name in os.environ else None
        )
        if sign and value is not None and sign.startswith(":") and "".join(value) == "":
            value = None
        if sign is None or (sign[-1] == "?" or (sign[-1] in "-=" and value is not None)):
            if name.isdigit():
                return self._special(name, line)
            return self._variable(name, line) if value is None else value
        if sign[-1] == "+" and value is None:
            return []
        inside = _Script(
            f'"{replacement}"' if not replacement.startswith(('"', "'")) else replacement
        )
        inside.variables = self.variables
        inside.unknown = self.unknown
        value = inside._word(split=False) or [""]
        if replacement.startswith(('"', "'")):
            value = [part.replace(" ", _WHOLE) for part in value]
        if sign[-1] == "=":
            self.variables[name] = value
        return value

    def _arithmetic(self, expression: str, line: int) -> str:
        """Integers and variables with + - * / %."""

        def number(node: ast.AST) -> int:
            match node:
                case ast.Expression():
                    return number(node.body)
                case ast.Constant(value=int() as value):
                    return value
                case ast.Name():
                    return int("".join(self._variable(node.id, line)))
                case ast.UnaryOp(op=ast.USub()):
                    return -number(node.operand)
                case ast.BinOp() if type(node.op) in _OPERATORS:
                    return _OPERATORS[type(node.op)](number(node.left), number(node.right))
            raise ValueError(ast.dump(node))

        try:
            return str(
                number(ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", expression).strip(), mode="eval"))
            )
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unknown(
                f"line {line}: $({expression.strip()[:60]}) is no arithmetic of known integers"
            )
