"""The real libraries of the trackers, offline: what two attempts of a run told them is read back with their own means.

They are found in this environment, or in that of .venv-trackers (tests/run.sh makes it), or of
PA_NPU_TRACKERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pa_npu.engines.registry import distributions
from tests.helpers.tracked_run import PATIENCE_S

ROOT = Path(__file__).parents[2]

# Each prints {"runs": number of runs, "loss": [[step, value], ...], "table": number of tables,
# "eval": [[step, value], ...]}.
READERS = {
    "mlflow": """
import json, sys, mlflow
mlflow.set_tracking_uri("sqlite:///" + sys.argv[1] + "/trackers/mlflow.db")
client = mlflow.MlflowClient()
(experiment,) = [e for e in client.search_experiments() if e.name == "arithmetic"]
runs = client.search_runs([experiment.experiment_id])
def curve(name): return [[m.step, m.value] for m in client.get_metric_history(runs[0].info.run_id, name)]
tables = client.list_artifacts(runs[0].info.run_id, "completions")
assert runs[0].data.params["run.seed"] == "1" and runs[0].info.status == "FINISHED"
assert client.get_metric_history(runs[0].info.run_id, "eval/test/pass_at_4")
print(json.dumps({"runs": len(runs), "loss": curve("train/loss"), "eval": curve("eval/test/greedy"), "table": len(tables)}))
""",
    "trackio": """
import glob, json, sqlite3, sys
(file,) = glob.glob(sys.argv[1] + "/trackers/trackio/*.db")
db = sqlite3.connect(file)
rows = [(run, step, json.loads(text)) for run, step, text in db.execute("select run_name, step, metrics from metrics order by id")]
def curve(name): return [[step, values[name]] for _, step, values in rows if name in values]
print(json.dumps({"runs": len({row[0] for row in rows}), "loss": curve("train/loss"), "eval": curve("eval/test/greedy"),
    "table": len(curve("completions"))}))
""",
    "wandb": """
import glob, json, sys
from wandb.proto import wandb_internal_pb2 as pb
def messages(data):
    # blocks of 32 KiB of records: checksum (4), length (2), kind (1: whole, 2: first, 3: middle, 4: last); 7 bytes of head
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + 7 : place + 7 + length]
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole
        place += 7 + length
runs, loss, evaluated, tables = set(), [], [], 0
for file in sorted(glob.glob(sys.argv[1] + "/trackers/wandb/offline-run-*/*.wandb")):
    for message in messages(open(file, "rb").read()):
        record = pb.Record()
        record.ParseFromString(message)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            runs.add(record.run.run_id)
        if kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            loss += [[row["iteration"], row["train/loss"]]] if "train/loss" in row else []
            evaluated += [[row["iteration"], row["eval/test/greedy"]]] if "eval/test/greedy" in row else []
            tables += any(key.startswith("completions") for key in row)
print(json.dumps({"runs": len(runs), "loss": loss, "eval": evaluated, "table": tables}))
""",
}


def python_of(tracker: str) -> str:
    """An interpreter that has the library, this one if it has. Skips where none has."""
    wanted = (tracker,)
    if distributions(None, wanted):
        return sys.executable
    for python in (
        os.environ.get("PA_NPU_TRACKERS_PYTHON"),
        str(ROOT / ".venv-trackers" / "bin" / "python"),
    ):
        if python and Path(python).exists() and distributions(python, wanted):
            return python
    pytest.skip(
        f"{tracker} is not installed here; tests/run.sh all installs it into .venv-trackers"
    )


def two_attempts(tracker: str, directory: Path) -> Path:
    """A run that is killed after iteration 3, and goes on from its checkpoint of version 2 to
    iteration 5.
    """
    run = directory / "run"
    for first, last in ((0, 4), (2, 6)):
        attempt = [
            python_of(tracker),
            "-m",
            "tests.helpers.tracked_run",
            tracker,
            str(run),
            str(first),
            str(last),
        ]
        output = subprocess.run(
            attempt, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert output.returncode == 0 and output.stdout.splitlines()[-1] == "lost 0", (
            output.stdout + output.stderr
        )
    return run


@pytest.mark.nightly  # in an environment of their own
@pytest.mark.parametrize("tracker", ["wandb", "swanlab", "trackio", "mlflow"])
def test_offline_a_resumed_run_is_one_run_with_one_curve_and_its_samples(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_MODE", "SWANLAB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # libraries keep settings there
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # where nobody listens
    run = two_attempts(tracker, tmp_path)
    known = json.loads((run / "trackers" / f"{tracker}.json").read_text())
    assert known["known"] and (known["iteration"], known["version"]) == (5, 2)
    if tracker == "swanlab":
        check_swanlab(run, known["id"])
        return
    actual = json.loads(
        subprocess.run(
            [python_of(tracker), "-c", READERS[tracker], str(run)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
    )
    assert actual["runs"] == 1
    assert actual["loss"] == [[step, float(step)] for step in range(6)]
    assert actual["eval"] == [[0, 0.25], [2, 0.25]]
    assert actual["table"] >= 6 - (tracker == "trackio")


def check_swanlab(run: Path, identity: str) -> None:
    """Its files are its own format: both attempts' directories carry the run's id, and hold the
    values' names.
    """
    directories = sorted(run.glob(f"trackers/swanlab/run-*{identity}*"))
    assert len(directories) == 2, sorted(run.glob("trackers/swanlab/*"))
    for directory in directories:
        content = b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())
        assert (
            b"train/loss" in content
            and b"eval/test/greedy" in content
            and b"completions" in content
        )
