"""A process with more than 1,024 open files starts and ends kept processes as any other."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from pa_npu.config.load import load_config
from pa_npu.control.worker_process import run_trial
from pa_npu.rewards.comparer import _Comparer

_PAST = 1100


@pytest.fixture
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * _PAST
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(_PAST)]
    try:
        assert max(opened) > 1023
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_users_code_is_tried_in_a_kept_process(many_open_files: None) -> None:
    config = load_config(
        [],
        ["model.path=m", "data.train=t", "algorithm.advantage=pa_npu.algorithm.advantages:centred"],
    )
    assert (
        run_trial(
            "pa_npu.algorithm.trial",
            config.model_dump_json().encode(),
            60.0,
            "algorithm",
            "too slow",
        )
        is None
    )


def test_expressions_are_compared(many_open_files: None) -> None:
    comparer = _Comparer()
    try:
        assert comparer.ask(r"\boxed{1+x}", "x+1") and not comparer.ask(r"\boxed{x+2}", "x+1")
    finally:
        comparer.end()
