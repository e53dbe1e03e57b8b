"""The viewer without a browser: what it reads from a run directory, what it serves and to whom, what it exports."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pa_npu.errors import UserError
from pa_npu.launcher.cli import main
from pa_npu.telemetry.timeline import Timeline
from pa_npu.viewer import run as viewer_run
from pa_npu.viewer import samples as viewer_samples
from pa_npu.viewer.run import RunDirectory, columns
from pa_npu.viewer.samples import whole_group
from pa_npu.viewer.server import ViewServer, answer, export
from pa_npu.viewer.timeline import RunTimeline
from tests.helpers.finished_run import (
    BEGAN_S,
    GROUPS,
    HOSTILE,
    ITERATION_S,
    ITERATIONS,
    RESPONSES,
    SECRET,
    make_run,
    make_supervised_run,
    metrics,
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("viewer") / "run")


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[ViewServer]:
    with ViewServer([RunDirectory(run_dir)]) as served:
        thread = threading.Thread(target=served.serve_forever, name="viewer")
        thread.start()
        yield served
        served.shutdown()
        thread.join(10)


def ask(
    server: ViewServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    actual = response.status, response.read(), response.headers
    connection.close()
    return actual


def test_numbers_of_the_overview_are_those_of_the_files(run_dir: Path) -> None:
    overview = RunDirectory(run_dir).overview()
    actual = overview["columns"]
    assert actual["iteration"] == list(range(ITERATIONS))
    assert actual["rewards.math"] == [metrics(i)["rewards"]["math"] for i in range(ITERATIONS)]
    assert actual["learned.decode_step_s"] == [0.003] * ITERATIONS and not any(
        "engines" in name for name in actual
    )
    assert [record["version"] for record in overview["evaluations"]] == [0, 4, 8, 12]
    state = {
        key: overview["state"][key]
        for key in ("word", "cause", "iterations", "total", "attempts", "left")
    }
    assert state == {
        "word": "finished",
        "cause": "",
        "iterations": ITERATIONS,
        "total": ITERATIONS,
        "attempts": 1,
        "left": None,
    }
    assert overview["facts"] == {
        "model": "models/tiny",
        "algorithm": "group-std advantages, clip loss",
        "data": "train.jsonl",
        "devices": "2 trainers + 2 engines (cpu)",
        "schedule": "periodic",
    }
    assert overview["sample_iterations"] == [0, 1, 2]
    assert [advice["title"] for advice in overview["advice"]] == ["Trainers wait for engines"]
    assert (
        overview["config"]["optimizer.clip_grad"]
        == overview["defaults"]["optimizer.clip_grad"]
        == 1.0
    )
    processes = {process["name"]: process for process in overview["processes"]}
    assert set(processes) == {"coordinator", "launcher", "trainer-0", "trainer-1"}
    assert (
        processes["trainer-0"]["warnings"] == 1
        and processes["trainer-0"]["last_event"] == "wait for engines"
    )


def test_secrets_of_the_engines_environment_are_not_shown(run_dir: Path) -> None:
    text = json.dumps(answer([RunDirectory(run_dir)], "run"))
    assert SECRET not in text and '"rollout.env.OMP_NUM_THREADS": "1"' in text


def test_waits_of_an_iteration_are_what_its_spans_add_up_to(run_dir: Path) -> None:
    actual = RunDirectory(run_dir).timeline(5)
    assert actual is not None and actual["seconds"] == pytest.approx(10.0) and not actual["running"]
    names = ["coordinator", "engine-0", "engine-1", "rewards", "trainer-0", "trainer-1"]
    assert [row["name"] for row in actual["rows"]] == names, "engines have the names of their logs"
    waits = {entry["name"]: entry for entry in actual["waits"]}
    trainer = waits["trainer-0"]
    assert trainer["parts"] | {"publish": 0, "checkpoint": 0} == pytest.approx(
        {
            "train": 5.5,
            "wait for groups": 3.0,
            "wait for engines": 1.0,
            "publish": 0,
            "checkpoint": 0,
        }
    )
    assert trainer["idle"] == pytest.approx(0.4), "it waits 4 of 10 s"
    assert trainer["other"] == pytest.approx(0.5), "between its five microbatches and the step"
    # groups 0, 2, 4: 0.2 to 3.0, 1.8 to 5.2, 3.4 to 7.4; then the publish of 0.5 s
    engine = waits["engine-0"]
    assert engine["parts"]["generate"] == pytest.approx(7.2) and engine["idle"] == pytest.approx(
        0.28
    )
    assert waits["engine-1"]["idle"] == pytest.approx(0.25)
    for row in actual["rows"]:
        bars = sorted(row["bars"])
        for first, two in pairwise(bars):
            assert first[0] != two[0] or first[1] + first[2] <= two[1] + 2e-6, (
                f"bars of a track overlap in {row['name']}"
            )
    assert RunDirectory(run_dir).timeline(ITERATIONS + 5) is None


def test_a_trainer_that_hears_late_of_a_publish_waits_in_the_iteration_that_this_ends(
    tmp_path: Path,
) -> None:
    """The record of an iteration counts all of its border, too."""
    run_dir = make_run(tmp_path / "run")
    file = run_dir / "timeline" / "trainer-0.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    start_s = BEGAN_S + 5 * ITERATION_S
    for event in events:
        if event.get("name") == "wait for engines" and event["start"] == start_s + 9.0:
            event["end"] += 0.4
        if event.get("name") == "wait for group" and event["start"] == start_s + ITERATION_S:
            event["start"] += 0.4
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    run = RunDirectory(run_dir)
    for iteration, groups_s, border_s in ((5, 3.0, 1.4), (6, 2.6, 1.0)):
        timeline = run.timeline(iteration)
        assert timeline is not None
        (trainer,) = [entry for entry in timeline["waits"] if entry["name"] == "trainer-0"]
        assert trainer["parts"]["wait for groups"] == pytest.approx(groups_s)
        assert trainer["parts"]["wait for engines"] == pytest.approx(border_s)
        assert trainer["idle"] == pytest.approx((groups_s + border_s) / ITERATION_S)


def test_a_device_shows_its_roles_and_is_no_engine(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "coordinator") as timeline:
        for version, end_s in ((0, 1.0), (1, 11.0)):
            timeline.complete("publish", end_s - 0.5, end_s, version=version)
        timeline.complete("group 0", 1.5, 6.0, "engine e-0")
        timeline.complete("decodes", 1.0, 6.0, "role of engine 0")
        timeline.complete("trains", 6.0, 10.5, "role of engine 0")
    actual = RunTimeline(tmp_path).iteration(0)
    assert actual is not None and [entry["name"] for entry in actual["waits"]] == ["e-0"]
    (role,) = [row for row in actual["rows"] if row["name"].startswith("role")]
    assert [bar[3:] for bar in role["bars"]] == [["generate", "decodes"], ["train", "trains"]]


def test_a_device_that_decodes_is_not_idle_while_its_trainer_waits(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "coordinator") as timeline:
        for version, end_s in ((0, 1.0), (1, 11.0)):
            timeline.complete("publish", end_s - 0.5, end_s, version=version)
        timeline.complete("decodes", 1.0, 6.0, "role of engine 0", ranks=[0])
        timeline.complete("decodes", 1.0, 9.0, "role of engine 1", ranks=[1])
    for rank, (start_s, end_s) in enumerate([(6.5, 8.5), (9.0, 10.5)]):
        with Timeline.for_run(tmp_path, f"trainer-{rank}") as timeline:
            timeline.complete("wait for group", 1.0, start_s)
            timeline.complete("group 0", start_s, end_s, "microbatches")
    actual = RunTimeline(tmp_path).iteration(0)
    assert actual is not None
    devices = {entry["name"]: entry for entry in actual["waits"] if entry["role"] == "device"}
    assert {name: entry["idle"] for name, entry in devices.items()} == pytest.approx(
        {"device of trainer-0": 0.05, "device of trainer-1": 0.0}
    )
    assert devices["device of trainer-0"]["parts"] == pytest.approx({"decodes": 5.0, "trains": 2.0})


def test_groups_have_their_responses_side_by_side(run_dir: Path) -> None:
    run = RunDirectory(run_dir)
    actual = run.samples(1)
    assert [group["index"] for group in actual["groups"]] == list(range(GROUPS)) and actual[
        "cut"
    ] is None
    short = actual["groups"][0]
    assert len(short["responses"]) == RESPONSES and short["responses"][0]["text"] == HOSTILE
    assert "pieces" not in short["responses"][1] and short["responses"][1]["length"] == 10
    whole = run.group(1, 0)
    assert whole is not None and run.group(1, 99) is None and run.group(99, 0) is None
    response = whole["responses"][1]
    assert (
        len(response["pieces"])
        == len(response["logprobs"])
        == len(response["trainer_logprobs"])
        == 10
    )
    assert response["rewards"] == pytest.approx({"math": 1.0, "my_reward:brevity": 0.2})


def test_the_list_of_an_iteration_is_bounded_and_says_what_it_lacks(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_samples, "MAX_TEXT", 300)
    monkeypatch.setattr(viewer_samples, "MAX_RESPONSES", 3 * RESPONSES)
    actual = RunDirectory(run_dir).samples(1)
    assert (
        actual["cut"] == 100
        and actual["left_out"] == (GROUPS - 3) * RESPONSES
        and len(actual["groups"]) == 3
    )
    assert all(len(group["prompt"]) <= 100 for group in actual["groups"])


def test_another_runs_answers_to_the_same_prompt_are_found_in_the_nearest_iteration(
    run_dir: Path, tmp_path: Path
) -> None:
    another = make_run(tmp_path / "other")
    (another / "samples" / "iteration_000001.parquet").unlink()
    peers = answer([RunDirectory(run_dir), RunDirectory(another)], "peers/1/4")
    assert [(peer["run"], peer["iteration"], peer["group"]["index"]) for peer in peers] == [
        ("other", 0, 4)
    ]
    assert len(peers[0]["group"]["responses"]) == RESPONSES
    shutil.rmtree(another / "samples")
    assert answer([RunDirectory(run_dir), RunDirectory(another)], "peers/1/4") == []


def test_a_session_is_a_tree_whose_turns_have_the_tokens_of_the_branch_that_trains_them(
    server: ViewServer,
) -> None:
    groups = [json.loads(ask(server, f"/api/group/1/{number}")[1]) for number in range(GROUPS)]
    assert [len(group["sessions"]) for group in groups] == [0, 0, 3, *[0] * (GROUPS - 3)]
    first, second, _ = groups[2]["sessions"]
    turns = {turn["number"]: turn for turn in first["turns"]}
    assert [(turn["number"], turn["parent"]) for turn in first["turns"]] == [
        (0, None),
        (1, 0),
        (2, 0),
    ]
    assert (
        turns[0]["responses"] == [0, 1]
        and turns[0]["reward"] == 0.5
        and HOSTILE in turns[0]["shown"]
    )
    assert [(turns[n]["response"], turns[n]["start"], turns[n]["end"]) for n in range(3)] == [
        (0, 0, 4),
        (0, 4, 9),
        (1, 0, 10),
    ]
    assert second["turns"][0]["responses"] == [2]
    assert len(groups[2]["responses"][1]["trainer_logprobs"]) == 10, (
        "differences of all tokens that a turn names"
    )


def test_files_that_grow_or_are_broken_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=2)
    run = RunDirectory(run_dir)
    assert len(run.records()) == 2 and run.overview()["state"]["word"] == "running"
    stamp = run.stamp()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(2))[:40])
    assert len(run.records()) == 2, "half a line is none yet"
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(metrics(2))[40:]
            + "\nnonsense\n[]\n"
            + '{"iteration": "x"}\n{"iteration": 3, "loss": NaN}\n'
        )
    assert [record["iteration"] for record in run.records()] == [
        0,
        1,
        2,
        3,
    ] and run.stamp() != stamp
    assert run.records()[-1]["loss"] is None
    (run_dir / "metrics.jsonl").write_text(json.dumps(metrics(0)) + "\n")
    assert [record["iteration"] for record in run.records()] == [0], "a resume has cut the file"
    (run_dir / "config.yaml").write_text("{[broken")
    (run_dir / "timeline" / "coordinator.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    assert run.overview()["config"] == {} and run.overview()["state"]["total"] is None


def test_a_long_run_is_thinned_out_and_keeps_its_last_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewer_run, "MAX_POINTS", 10)
    records = [
        {"iteration": i, "loss": float(i), "tokens_prompt": 1, "tokens_response": 2}
        for i in range(95)
    ]
    actual = columns(records)
    assert actual["iteration"] == [*range(0, 95, 10), 94] == actual["loss"]
    assert actual["tokens_total"] == [3.0 * (i + 1) for i in actual["iteration"]], (
        "of all iterations, drawn or not"
    )
    part = columns(records, 50, 58)
    assert part["iteration"] == list(range(50, 59)), "a part of it has more points"
    assert part["tokens_total"][0] == 153.0


def test_the_server_is_on_loopback_and_answers_only_who_calls_it_so(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert (
        ask(server, "/api/run")[0] == 200
        and ask(server, "/api/run", host=f"localhost:{server.server_port}")[0] == 200
    )
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1"):
        assert ask(server, "/api/run", host=host or " ")[0] == 403, host
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/api/run", method)[0] == 501


@pytest.mark.parametrize(
    "path",
    [
        "/api/log/../config.yaml",
        "/api/log/%2e%2e/config.yaml",
        "/api/log//etc/passwd",
        "/etc/passwd",
        "/page.css",
        "/api/samples/-1",
        "/api/samples/1e3",
        "/api/samples/99999999999999999999",
        "/api/timeline/x",
        "/api/group/1",
        "/api/group/1/2/3",
        "/api/question/1/0",
        "/api/questions/1/%C2%B2",
        "/api/columns/5/",
        "/api/runs",
        "/run/api/run",
        "/api/",
        "/api/no",
    ],
)
def test_nothing_but_the_run_is_served(server: ViewServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert status == 404 and body in (b"null", b"not found\n")


def test_the_page_allows_its_own_script_and_style_and_nothing_else(server: ViewServer) -> None:
    status, body, headers = ask(server, "/")
    text = body.decode()
    assert (
        status == 200
        and headers["Cache-Control"] == "no-store"
        and headers["X-Frame-Options"] == "DENY"
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert (
        policy
        and "default-src 'none'" in policy[1]
        and "unsafe" not in policy[1]
        and policy[1].count("sha256-") == 2
    )
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text), (
        "no address of anything outside"
    )


def test_an_unchanged_run_is_not_sent_again(server: ViewServer) -> None:
    stamp = json.loads(ask(server, "/api/run")[1])["stamp"]
    assert ask(server, f"/api/run?stamp={stamp}")[1] == b"null"


def test_a_copied_directory_is_exported_the_same_and_nothing_is_written_to_it(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(run_dir, copy)
    before = {path: path.stat().st_mtime_ns for path in [copy, *copy.rglob("*")]}
    assert export([RunDirectory(copy)], tmp_path / "page.html") == ""
    assert {path: path.stat().st_mtime_ns for path in [copy, *copy.rglob("*")]} == before
    text = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert HOSTILE in data["group/2/2"]["sessions"][0]["turns"][0]["shown"], (
        "what an agent was shown"
    )
    assert (
        data["questions/12/0"]["sets"][0]["rows"]
        and HOSTILE in data["question/12/0/0"]["answers"][0]["text"]
    )
    assert (
        data["samples/2"]["groups"][0]["responses"][0]["text"] == HOSTILE and "timeline/11" in data
    )
    assert "<img" not in text and text.count("<script") == 2 == text.count("</script"), (
        "texts cannot become markup"
    )
    assert SECRET not in text and "connect-src 'none'" in text


def test_a_run_too_large_for_a_page_leaves_the_oldest_out_and_says_so(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pa_npu.viewer.server.MAX_EXPORT_BYTES", 150_000)
    assert "oldest iterations left out" in export([RunDirectory(run_dir)], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 300_000


def test_the_command_exports_and_refuses_what_is_no_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run_dir), "--export", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a.html'}\n"
    for wrong in (tmp_path / "none", tmp_path):
        assert main(["view", str(wrong)]) == 2
        assert "run directory" in capsys.readouterr().err
    assert main(["view", str(run_dir), "--port", "99999"]) == 2
    with pytest.raises(UserError, match="choose another"):
        export([RunDirectory(run_dir)], run_dir / "config.yaml" / "x.html")


def test_a_run_on_rows_of_data_has_losses_without_intervals_and_says_what_of_a_row_is_trained(
    tmp_path: Path,
) -> None:
    run = RunDirectory(make_supervised_run(tmp_path / "sft"))
    metrics = run.evaluations()[-1]["sets"]["test"]["metrics"]
    assert set(metrics) == {"loss", "perplexity"}
    assert metrics["loss"]["low"] is None and metrics["loss"]["questions"] is None
    group = whole_group(run.directory, 0, 1)
    assert group is not None
    response = group["responses"][0]
    assert [stretch["weight"] for stretch in response["stretches"]] == [1.0, 0.0, 0.5]
    assert "".join(stretch["text"] for stretch in response["stretches"])
    assert not response["rewarded"] and response["version"] is None
