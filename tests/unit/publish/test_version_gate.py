"""The version gate: weights that are sent do not change."""

from __future__ import annotations

import threading

import pytest

from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.late_engines import VersionGate


def test_only_the_version_that_is_in_place_can_be_held() -> None:
    gate = VersionGate(1.0)
    assert not gate.acquire(3), "nothing is published yet"
    gate.open(3)
    assert not gate.acquire(2)
    assert gate.acquire(3)
    gate.release()
    gate.close()
    assert not gate.acquire(3), "the optimizer has begun"


def test_a_change_waits_for_the_sender_and_not_for_ever() -> None:
    gate = VersionGate(0.2)
    gate.open(1)
    assert gate.acquire(1)
    with pytest.raises(
        DeadlineExceeded, match=r"version 1 is still being sent to a late engine after 0\.2 s"
    ):
        gate.close()
    release = threading.Timer(0.05, gate.release)
    release.start()
    gate.close()
    release.join()
    assert not gate.acquire(1)


def test_what_is_offered_is_held_once_engines_have_swapped() -> None:
    """The version before until then, for engines that come late; whoever asks for the offered one
    knows of the swap.
    """
    gate = VersionGate(20.0)
    taken = []
    gate.open(3)
    gate.offer(4, lambda: taken.append(4))
    assert gate.acquire(3) and not taken, (
        "an engine that is started again generates by what the others have"
    )
    gate.release()
    assert gate.acquire(4) and taken == [4]
    gate.release()
    gate.accept_offer()
    assert taken == [4], "once"
    assert not gate.acquire(3)
    gate.offer(5, lambda: taken.append(5))
    gate.accept_offer()
    assert taken == [4, 5] and gate.acquire(5)
    gate.release()
    gate.offer(6, lambda: taken.append(6))
    gate.open(6)  # published at the border after all
    gate.accept_offer()
    assert taken == [4, 5] and gate.acquire(6)


def test_an_offer_is_not_taken_from_under_a_sender() -> None:
    gate = VersionGate(0.05)
    taken = []
    gate.open(3)
    gate.offer(4, lambda: taken.append(4))
    assert gate.acquire(3)
    with pytest.raises(DeadlineExceeded, match="version 3 is still being sent"):
        gate.accept_offer()
    assert not taken
