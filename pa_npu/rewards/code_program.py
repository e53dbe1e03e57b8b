"""Finds the program in a response.

It is the last block that is marked as Python, else the last unmarked one that is a program. If the
row holds the beginning of the program (HumanEval's `prompt`), the response may be the rest of it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# An opening fence may stand in a list or a quotation; one that names Python may also follow text on
# its line.
_OPENING = re.compile(
    r"(?P<before>(?:[ \t]|>|[-*+] |\d+[.)] )*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)"
)
_OPENING_IN_LINE = re.compile(
    r".*[^`\s]\s*(?P<fence>```)(?P<info>[ \t]*(?:python|py)[\d.]*)[ \t]*", re.IGNORECASE
)
_QUOTATION = re.compile(r"[ \t]*>[ \t]?")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*", re.IGNORECASE)
_MARKDOWN = frozenset({"markdown", "md"})  # a whole answer that somebody has put into a block
# [BEGIN] and [DONE] are those of MBPP's few-shot prompt
_MARKED_OTHERWISE = re.compile(
    r"^\[BEGIN\][ \t]*\n(.*?)(?:^[ \t]*\[DONE\]|\Z)|^\[PYTHON\][ \t]*\n(.*?)(?:^[ \t]*\[/PYTHON\]|\Z)"
    r"|<(?:code|answer|python)>[ \t]*\n(.*?)</(?:code|answer|python)>",
    re.DOTALL | re.MULTILINE,
)
_BEGINNINGS = ("prompt", "complete_prompt", "code_prompt")  # columns of HumanEval, BigCodeBench
_LANGUAGE = re.compile(r"[\s{.]*([\w.+#-]*)")
_DEFINED = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ "
    r"\t]*(?::[^=\n]+)?=(?!=)|^(?:from|import)\b.*\b(\w+)[ \t]*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class _Block:
    language: str
    text: str

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.language) is not None


def program_of(response: str, needed: Collection[str] = ()) -> str | None:
    """Returns the program of a response, or None if it has none.

    Blocks marked as Python come before unmarked ones, which are often sample output. Among several,
    the last one that defines the names `needed` counts, since a block behind it may only show how
    to call them; if none does, the last one. A response without any block is a program if all of it
    is one.
    """
    blocks = list(_blocks(response))
    if not blocks:
        for parts in _MARKED_OTHERWISE.findall(response):
            blocks.append(_Block("python", "".join(parts)))
    programs = [block.text for block in blocks if block.is_python and block.text.strip()]
    if not programs:
        unmarked = [block.text for block in blocks if not block.language]
        programs = [text for text in unmarked if _is_program(text)]
    if not blocks and _is_program(response):
        programs = [response]
    if not programs:
        return None
    for text in reversed(programs):
        if set(needed) <= _defined(text):
            return text
    return programs[-1]


def whole_program(response: str, row: Mapping[str, Any], needed: Collection[str]) -> str | None:
    """Returns the program of a response behind what its row gives of it; None if there is none.

    A row of HumanEval begins the program: imports, helpers and the head of the function that is
    asked for. The response may repeat that, have the function alone, or its body alone.
    """
    program = program_of(response, needed)
    beginning = _beginning(row, needed)
    if beginning is None:
        return program
    defined_before = _defined(beginning)
    asked = defined_before & set(needed)
    if program is not None and asked <= _defined(program):
        is_whole = defined_before <= _defined(program) or "from __future__" in program
        return program if is_whole else f"{beginning}\n\n{program}"
    body = response if program is None else program
    if _has_return(_tree(body)):  # a body without its margin
        body = textwrap.indent(body, "    ")
    if body[:1] in (" ", "\t") and _tree(beginning + body) is not None:
        return beginning + body
    return program


def _has_return(tree: ast.Module | None) -> bool:
    """Returns whether statements outside of any definition return something."""
    if tree is None:
        return False
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    outside = [statement for statement in tree.body if not isinstance(statement, definitions)]
    return any(isinstance(node, ast.Return) for part in outside for node in ast.walk(part))


def _beginning(row: Mapping[str, Any], needed: Collection[str]) -> str | None:
    """Returns the beginning of the program that a row holds, with a line end; None if there is none."""
    for column in _BEGINNINGS:
        text = row.get(column)
        if isinstance(text, str) and "def " in text and set(needed) & _defined(text):
            tree = _tree(text)
            if tree is not None and isinstance(tree.body[-1], (ast.FunctionDef, ast.ClassDef)):
                return text.rstrip() + "\n"
    return None


def _blocks(response: str) -> Iterator[_Block]:
    """Yields fenced blocks as CommonMark defines them.

    The indentation of a list and the marks of a quotation around a block are removed.
    """
    lines = response.splitlines()
    index = 0
    while index < len(lines):
        opening = _OPENING.fullmatch(lines[index])
        before = opening["before"] if opening else ""
        opening = opening or _OPENING_IN_LINE.fullmatch(lines[index])
        index += 1
        if opening is None:
            continue
        end = _closing(lines, index, opening["fence"], len(before.expandtabs(4)))
        inside = lines[index:end]
        index = end + 1
        if end < len(lines):
            last = lines[end].partition(opening["fence"])[0]
            # the fence stands at the end of the last line of code
            inside += [last] if last.strip(" \t>") else []
        language = _language(opening["info"])
        text = _without_margin(inside, before)
        if language.lower() in _MARKDOWN:
            yield from _blocks(text)
        else:
            yield _Block(language, text)


def _closing(lines: list[str], start: int, fence: str, width: int) -> int:
    """Returns the index of the line that closes a block, or the number of lines if none does.

    `width`: columns before the opening fence. A fence that is indented by four more belongs to the
    program, perhaps to a docstring; it closes the block only if no other fence does.
    """
    closing = re.compile(
        r"([ \t>]*)" + re.escape(fence[0]) + "{" + str(len(fence)) + r",}[ \t]*(?:</?\w+>[ \t]*)*"
    )
    indented: int | None = None
    after_code: int | None = None
    for index in range(start, len(lines)):
        line = lines[index]
        matched = closing.fullmatch(line)
        if matched is not None:
            if len(matched[1].expandtabs(4)) <= width + 3:
                return index
            indented = index if indented is None else indented
        elif after_code is not None and _opens_named_block(line):
            return after_code
        elif (
            after_code is None
            and line.strip(" \t>`~")
            and _at_an_end(line, fence)
            and not _opens_named_block(line)
        ):
            after_code = index
    if after_code is not None:
        return after_code
    return len(lines) if indented is None else indented


def _at_an_end(line: str, fence: str) -> bool:
    """Returns whether a fence follows the last code on its line, or is followed by prose."""
    return line.rstrip().endswith(fence) or line.lstrip(" \t>").startswith(f"{fence} ")


def _opens_named_block(line: str) -> bool:
    opening = _OPENING.fullmatch(line) or _OPENING_IN_LINE.fullmatch(line)
    return (
        opening is not None
        and opening["info"][:1].strip() != ""
        and bool(_language(opening["info"]))
    )


def _language(info: str) -> str:
    matched = _LANGUAGE.match(info)
    return matched[1] if matched else ""


def _without_margin(lines: list[str], before: str) -> str:
    """Returns the lines of a block as a text, without their common indentation.

    `before`: the text before the opening fence, list marks included; code may be indented by as
    much.
    """
    if ">" in before:
        lines = [_QUOTATION.sub("", line, count=1) for line in lines]
        before = before.replace(">", "", 1)
    width = len(before.expandtabs(4))
    cut = []
    for line in lines:
        margin = len(line) - len(line.lstrip(" \t"))
        cut.append(line[min(margin, width) :] if "\t" not in line[:margin] else line)
    text = "".join(f"{line}\n" for line in cut)
    if _tree(text) is None:
        evened = textwrap.dedent("".join(f"{line}\n" for line in lines))
        if _tree(evened) is not None:
            return evened
    return text


def _is_program(text: str) -> bool:
    """Returns whether a text is Python that does something.

    "3", "Yes" and "[1, 2]" are valid Python as well, but do nothing.
    """
    tree = _tree(text)
    if tree is None:
        return False
    values = (
        ast.Constant,
        ast.Name,
        ast.Tuple,
        ast.List,
        ast.Set,
        ast.Dict,
        ast.UnaryOp,
        ast.BinOp,
        ast.Compare,
        ast.BoolOp,
    )
    return not all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, values))
        for statement in tree.body
    )


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(text: str) -> set[str]:
    """Returns the names that a program defines; by lines, since it need not compile."""
    names: set[str] = set()
    for groups in _DEFINED.findall(text):
        names.update(name for name in groups if name)
    return names
