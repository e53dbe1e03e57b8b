"""Whatever stands in a run's files in place of what this program writes: the page's data is made, and is as the page reads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer
from pa_npu.viewer.shelf import Shelf
from tests.helpers.chained_run import step, write_chain
from tests.helpers.finished_run import make_run

# elsewhere every 21st value is replaced, another one in each record, beginning with another one for each kind
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
STRANGE: dict[str, Any] = {
    "a text": "text",
    "an empty text": "",
    "a list": [1, "a", None, {}],
    "an empty list": [],
    "a mapping": {"a": {"b": [1]}, "version": "x", "value": None},
    "an empty mapping": {},
    "nothing": None,
    "a truth": True,
    "a negative number": -1,
    "a huge number": 10**17,
    "a huge float": 1e300,
    "not finite": float("inf"),
}
JSON_FILES = (
    "metrics.jsonl",
    "chain.jsonl",
    "evaluations.jsonl",
    *(f"timeline/{name}.jsonl" for name in ("launcher", "coordinator", "trainer-0")),
)
PATHS = (
    "run",
    "compare",
    "chain",
    "timeline/0",
    "timeline/1",
    "samples/0",
    "samples/1",
    "group/0/0",
    "group/0/2",
    "peers/0/2",
    "questions/0/0",
    "questions/4/0",
    "question/4/0/0",
    "columns/0/5",
    "log/coordinator.log",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("strange") / "run", iterations=4)
    write_chain(run, [step(number) for number in range(4)])
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "runs" / "run")
    return tmp_path / "runs" / "run"


def everything(run: Path) -> dict[str, Any]:
    """Asks for all that the page asks for, and checks it as the page reads it."""
    shown = RunDirectory(run)
    data = {path: answer([shown, shown], path) for path in PATHS}
    data["runs"] = Shelf(run.parent).table()
    json.dumps(data, allow_nan=False)  # a browser reads no other
    overview = data["run"]
    assert isinstance(overview["stamp"], str) and set(overview["state"]) >= {
        "word",
        "cause",
        "lines",
        "left",
    }
    for values in overview["columns"].values():
        assert all(value is None or isinstance(value, float) for value in values)
        assert len(values) == len(overview["columns"]["iteration"])
    for record in overview["evaluations"]:
        for summary in (record["sets"] or {}).values():
            for estimate in summary["metrics"].values():
                assert all(isinstance(value, float) for value in estimate.values())
    for name in ("samples/0", "samples/1"):
        for group in data[name]["groups"]:
            assert isinstance(group["prompt"], str) and all(
                isinstance(r["text"], str) for r in group["responses"]
            )
    return data


def replaced(value: Any, strange: Any) -> Iterator[Any]:
    """Yields the value with `strange` in place of each part of it, one at a time."""
    yield strange
    if isinstance(value, dict):
        for key, item in value.items():
            for part in replaced(item, strange):
                yield {**value, key: part}
    elif isinstance(value, list) and value:
        for part in replaced(value[0], strange):
            yield [part, *value[1:]]


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", JSON_FILES)
def test_records_with_anything_in_place_of_any_value(run: Path, name: str, kind: str) -> None:
    file = run / name
    records = [json.loads(line) for line in file.read_text().splitlines()]
    most = max(len(list(replaced(record, 0))) for record in records[:40])
    every, first = (1, 0) if NIGHTLY else (21, list(STRANGE).index(kind) % 7)
    for variant in range(first, min(60, most + 2), every):
        lines = []
        for record in records[:40]:
            variants = list(replaced(record, STRANGE[kind]))
            lines.append(variants[variant % len(variants)])
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        everything(run)


@pytest.mark.parametrize("kind", STRANGE)
def test_a_configuration_with_anything_in_place_of_a_section_or_key(run: Path, kind: str) -> None:
    import yaml

    tree = yaml.safe_load((run / "config.yaml").read_text())
    for variant in [
        {section: STRANGE[kind] for section in tree},
        {section: dict.fromkeys(keys, STRANGE[kind]) for section, keys in tree.items()},
    ]:
        (run / "config.yaml").write_text(yaml.safe_dump(variant))
        everything(run)


def test_anything_in_place_of_a_file_and_a_file_in_place_of_a_folder(run: Path) -> None:
    names = sorted(path.relative_to(run) for path in run.rglob("*"))
    assert len(names) > 15
    for name in names if NIGHTLY else names[::2]:
        kept = run.parent.parent / "kept"
        (run / name).rename(kept)
        (run / name).mkdir()
        everything(run)
        (run / name).rmdir()
        (run / name).write_text("a file, where this program has none")
        everything(run)
        (run / name).unlink()
        everything(run)
        kept.rename(run / name)
    for name in (
        "checkpoints/iteration_²",
        "samples/iteration_².parquet",
        "evaluations/version_00000².parquet",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).mkdir()
    everything(run)


OF_NIGHTLY = (pytest.param(kind, marks=pytest.mark.nightly) for kind in ("a list", "nothing"))


@pytest.mark.parametrize("kind", ["a text", "a number", *OF_NIGHTLY])
def test_samples_and_results_with_columns_of_other_kinds(run: Path, kind: str) -> None:
    values: dict[str, Any] = {
        "a text": "x",
        "a list": [["x"], [1.5]][0],
        "a number": 7.5,
        "nothing": None,
    }
    for file in [*(run / "samples").glob("*0.parquet"), *(run / "evaluations").glob("*.parquet")]:
        table = pyarrow.parquet.read_table(file)
        content = file.read_bytes()
        for name in table.column_names if NIGHTLY else table.column_names[::4]:
            strange = pyarrow.array([values[kind]] * table.num_rows)
            place = table.column_names.index(name)
            pyarrow.parquet.write_table(table.set_column(place, name, strange), file)
            everything(run)
            pyarrow.parquet.write_table(table.drop([name]), file)
            everything(run)
        file.write_bytes(content)
