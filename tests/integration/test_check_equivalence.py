"""tools/check_equivalence.py, shortened: two iterations on one real engine; it passes equal runs and fails others.

Nightly: test_exact_schedules.py compares runs, and tests/unit/tools/test_check_equivalence.py has the
verdicts.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launched import Launched, settings
from tools import check_equivalence
from tools.check_equivalence import VARIANTS, Variant

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

START_TIMEOUT_S = 400.0
PERIODIC, COMPLETION, _TURNS, _ROLES, CONTROL = VARIANTS
# Equal to the reference but for a hundredth of the learning rate: what must be bit-identical is
# not.
BROKEN = Variant(
    "broken, order=prompt",
    ("schedule.stream=true", "schedule.order=prompt", "optimizer.learning_rate=0.000202"),
)


@pytest.fixture(scope="module")
def attach(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Settings of runs on an engine that all of them share."""
    directory = tmp_path_factory.mktemp("engines")
    engines = Launched(directory, "engines", *settings(tiny, directory / "shared"))
    try:
        engines.wait_for(
            lambda: "engine-0 ready" in engines.output, "the engine is ready", START_TIMEOUT_S
        )
        yield next(
            line for line in engines.output.splitlines() if "rollout.attach=" in line
        ).split()[-2:]
        engines.family()
        engines.popen.send_signal(signal.SIGINT)
        engines.popen.wait(30)
    finally:
        engines.close()


@pytest.fixture
def checked(
    attach: list[str], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, str]]]:
    """Checks variants against a synchronous run; gives the exit code and the line of each."""
    common = [
        setting
        for setting in settings(tiny, tmp_path)
        if not setting.startswith(("run.dir=", "data.test="))
    ]
    # a reward that a random model gets now and then, so that there is something to learn
    common += [
        'reward.functions=[{name: format, pattern: "[0-4]"}]',
        "rollout.engines=1",
        "trainer.devices=1",
        "checkpoint.every=0",
        "telemetry.trackers=[]",
    ]

    def check(*variants: Variant) -> tuple[int, dict[str, str]]:
        arguments = ["--iterations", "2", "--work", str(tmp_path / "work"), *common, *attach]
        code = check_equivalence.main(arguments, variants)
        return code, {
            line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()
        }

    return check


def test_periodic_runs_equal_synchronous_ones_and_a_run_that_does_not_fails_the_check(
    checked: Callable[..., tuple[int, dict[str, str]]],
) -> None:
    code, lines = checked(PERIODIC, BROKEN)
    assert lines[PERIODIC.name].endswith("bit-identical"), lines
    assert "FAILED: must be bit-identical" in lines[BROKEN.name], lines
    assert code == 1, "a broken bound must end the tool with 1"


def test_the_order_of_arrival_changes_rounding_alone_and_another_seed_all(
    checked: Callable[..., tuple[int, dict[str, str]]],
) -> None:
    code, lines = checked(COMPLETION, CONTROL)
    assert "below 1e-05" in lines[COMPLETION.name], lines
    assert lines[CONTROL.name].endswith("differs, as it must"), lines
    assert code == 0
