"""A folder of runs: one row each, opened and compared under an address of its own; nothing but the folder's runs is served."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.errors import UserError
from pa_npu.launcher.cli import main
from pa_npu.viewer import shelf as viewer_shelf
from pa_npu.viewer.server import ViewServer
from pa_npu.viewer.shelf import Shelf
from tests.helpers.finished_run import BEGAN_S, ITERATIONS, SECRET, end_run, make_run, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf") / "runs"
    make_run(folder / "good")
    end_run(
        make_run(folder / "bad run", iterations=3), "failed", f"trainer-0 ended, HF_TOKEN={SECRET}"
    )
    (folder / "notes").mkdir()
    (folder / "file").write_text("x")
    make_run(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewServer]:
    with ViewServer(Shelf(folder)) as served:
        thread = threading.Thread(target=served.serve_forever, name="viewer")
        thread.start()
        yield served
        served.shutdown()
        thread.join(10)


def ask(server: ViewServer, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path)
    response = connection.getresponse()
    actual = response.status, response.read()
    connection.close()
    return actual


def test_the_table_has_a_row_per_run_with_its_state_and_numbers(folder: Path) -> None:
    table = Shelf(folder).table()
    rows = {row["name"]: row for row in table["runs"]}
    assert (
        table["folder"] == "runs" and table["left_out"] == 0 and rows.keys() == {"good", "bad run"}
    )
    good = rows["good"]
    bad = rows["bad run"]
    assert good["state"]["word"] == "finished" and good["state"]["iterations"] == ITERATIONS
    assert good["state"]["started"] == BEGAN_S - 6 and good["facts"]["model"] == "models/tiny"
    assert good["evaluation"] == good["best"] == 0.91 and bad["evaluation"] == 0.31
    assert good["numbers"]["tpspd"] == pytest.approx(
        sorted(metrics(i)["tpspd"] for i in range(ITERATIONS))[-5:][0], rel=0.1
    )
    assert bad["state"]["word"] == "failed" and SECRET not in json.dumps(table)


def test_a_run_that_goes_on_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", iterations=3)
    shelf = Shelf(tmp_path / "runs")
    assert shelf.table()["runs"][0]["state"]["iterations"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(3)) + "\n")
    assert shelf.table()["runs"][0]["state"]["iterations"] == 4
    shutil.rmtree(run)
    assert shelf.table()["runs"] == []


def test_each_run_has_its_own_address_and_is_compared_with_those_that_are_named(
    server: ViewServer,
) -> None:
    assert [row["name"] for row in json.loads(ask(server, "/api/runs")[1])["runs"]] in (
        ["good", "bad run"],
        ["bad run", "good"],
    )
    assert ask(server, "/api/run") == (200, b"null"), "the folder is no run"
    for path in ("/", "/good/", "/bad%20run/?with=good"):
        status, body = ask(server, path)
        assert status == 200 and b"<html" in body, path
    assert json.loads(ask(server, "/bad%20run/api/run")[1])["name"] == "bad run"
    compared = json.loads(ask(server, "/bad%20run/api/compare?with=good&with=good2&with=..")[1])
    assert [run["name"] for run in compared] == ["good"]
    peers = json.loads(ask(server, "/bad%20run/api/peers/1/4?with=good")[1])
    assert [peer["run"] for peer in peers] == ["good"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/compare",
        "/good",
        "/notes/",
        "/file/",
        "/outside/api/run",
        "/../outside/api/run",
        "/..%2Foutside/api/run",
        "/%2e%2e/api/run",
        "/good/../../outside/api/run",
        "//api/compare",
        "/good/api/runs",
        "/good%00/api/run",
    ],
)
def test_nothing_but_the_runs_of_the_folder_is_served(server: ViewServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_the_newest_runs_are_shown_and_the_count_of_the_others_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_shelf, "MAX_RUNS", 1)
    for path in (folder / "good").rglob("*"):
        os.utime(path, (1e9, 1e9))
    table = Shelf(folder).table()
    assert [row["name"] for row in table["runs"]] == ["bad run"] and table["left_out"] == 1


def test_a_run_that_cannot_be_read_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_run = viewer_shelf.is_run_directory

    def refused(path: Path) -> bool:
        if path.name == "bad run":
            raise PermissionError(13, "Permission denied", str(path))
        return is_run(path)

    monkeypatch.setattr(viewer_shelf, "is_run_directory", refused)
    assert [row["name"] for row in Shelf(folder).table()["runs"]] == ["good"]


def test_a_folder_that_is_gone_is_said_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "a", iterations=2)
    with ViewServer(Shelf(tmp_path / "runs")) as served:
        thread = threading.Thread(target=served.serve_forever, name="viewer")
        thread.start()
        shutil.rmtree(tmp_path / "runs")
        for path in ("/api/runs", "/a/api/run", "//["):
            status, body = ask(served, path)
            assert status in (404, 503) and body.count(b"\n") <= 1, path
        served.shutdown()
        thread.join(10)
    assert capsys.readouterr().err == ""


def test_few_runs_are_kept_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer_shelf, "MAX_OPEN", 1)
    shelf = Shelf(folder)
    first = shelf.open("good")
    assert (
        shelf.open("good") is first
        and shelf.open("bad run") is not None
        and shelf.open("good") is not first
    )


def test_the_command_exports_the_table_and_refuses_a_folder_without_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "table.html"
    assert main(["view", str(folder), "--export", str(page)]) == 0
    actual = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert actual is not None and len(json.loads(actual[1])["runs"]["runs"]) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run directory"):
        Shelf(tmp_path / "empty")
    capsys.readouterr()
    many = [str(folder / "good")] * 8
    assert main(["view", *many, "--export", str(page)]) == 2
    assert "more than 7" in capsys.readouterr().err
