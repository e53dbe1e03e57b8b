"""The documents: the reference is the schema's, the site builds without a warning, links lead somewhere, commands are known."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pa_npu.errors import UserError
from pa_npu.launcher.cli import SUBCOMMANDS, _parser
from tests.unit.launcher.test_cli import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*pa-npu (.+)$")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Every `pa-npu` line of the documents' bash blocks, with its page; comments cut off, continued
    lines joined.
    """
    actual = []
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := COMMAND.match(line.strip()):
                    actual.append((page.name, shlex.split(match[1], comments=True)))
    return actual


def test_the_reference_is_that_of_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, "tools/write_reference.py", "--check"], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, "run python tools/write_reference.py"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', page), (
        "the site is readable offline"
    )
    actual = json.loads(
        (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    )
    assert actual["config"]["min_search_length"] <= 2 and any(
        "KL" in entry["text"] for entry in actual["docs"]
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    docs = ROOT / "docs"
    left_out = [
        str(p.relative_to(docs))
        for p in docs.rglob("*.md")
        if f": {p.relative_to(docs)}\n" not in navigation
    ]
    assert left_out == []


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://[\w.-]+(/|$)", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            wrong.append(target)
    assert not wrong


def test_commands_of_the_documents_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-command and options exist; the configurations that they name, and their keys, are read."""
    monkeypatch.chdir(ROOT)
    actual = commands()
    assert len(actual) > 10 and {arguments[0] for _, arguments in actual} & SUBCOMMANDS.keys()
    for page, arguments in actual:
        arguments = [
            argument for argument in arguments if not re.match(r"^\[?\.\.\.\]?$", argument)
        ]
        if any(re.match(r"^\[|.*\|", argument) for argument in arguments[1:]) or {
            "--help",
            "--version",
        } & {*arguments}:
            continue  # a synopsis, in which brackets and bars stand for choices
        try:
            options, rest = _parser(arguments).parse_known_args(arguments)
        except SystemExit:
            pytest.fail(f"{page}: pa-npu {' '.join(arguments)} is not understood")
        configs = [file for file in getattr(options, "config", []) if (ROOT / file).is_file()]
        if configs:
            from pa_npu.launcher import subcommands

            try:
                options.config, options.overrides = configs, getattr(options, "overrides", [])
                subcommands.read(options, rest)
            except UserError as error:
                pytest.fail(f"{page}: pa-npu {' '.join(arguments)}: {error}")
