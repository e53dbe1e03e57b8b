"""The version gate: weights that are sent do not change, and ranks stop at one border."""

from __future__ import annotations

import threading

import pytest

from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.version_gate import VersionGate

WAIT_S = 20.0


def passed(gate: VersionGate) -> threading.Thread:
    """A thread that passes one border."""

    def work() -> None:
        with gate.border():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_only_the_version_that_is_in_place_can_be_held() -> None:
    gate = VersionGate(1.0)
    assert not gate.hold(3), "nothing is published yet"
    gate.open(3)
    assert not gate.hold(2)
    assert gate.hold(3)
    gate.release()
    gate.close()
    assert not gate.hold(3), "the optimizer has begun"


def test_a_change_waits_for_the_sender_and_not_for_ever() -> None:
    gate = VersionGate(0.2)
    gate.open(1)
    assert gate.hold(1)
    with pytest.raises(DeadlineExceeded, match=r"version 1 is still being sent to a late engine after 0\.2 s"):
        gate.close()
    release = threading.Timer(0.05, gate.release)
    release.start()
    gate.close()
    release.join()
    assert not gate.hold(1)


def test_a_rank_that_is_behind_goes_on_to_the_border_of_the_others() -> None:
    gate = VersionGate(WAIT_S)
    assert gate.freeze() == 0
    gate.stop_at(2)  # another rank is at border 2
    for _ in range(2):
        with gate.border():
            pass
    thread = passed(gate)
    gate.wait_stopped(WAIT_S)
    assert thread.is_alive()
    gate.go_on()
    thread.join(WAIT_S)
    assert not thread.is_alive() and gate.freeze() == 3


def test_training_does_not_pass_a_border_between_freezing_and_stopping() -> None:
    gate = VersionGate(WAIT_S)
    at = gate.freeze()
    thread = passed(gate)
    with pytest.raises(DeadlineExceeded, match=r"did not come to microbatch border 1 within 0.01 s"):
        gate.stop_at(at + 1)
        gate.wait_stopped(0.01)
    thread.join(WAIT_S)
    assert gate.freeze() == at + 1


def test_training_that_waits_for_a_sender_has_a_deadline() -> None:
    gate = VersionGate(0.05)
    gate.open(7)
    gate.freeze()
    with pytest.raises(DeadlineExceeded, match="weight version 7 is still being sent"), gate.border():
        pass


def test_the_end_of_a_version_is_a_border() -> None:
    """The last microbatch is trained: a delivery that begins now stops the ranks where the weights would change."""
    gate = VersionGate(WAIT_S)
    gate.open(0)
    assert gate.hold(0)
    gate.stop_at(gate.freeze())
    closing = threading.Thread(target=gate.close)
    closing.start()
    gate.wait_stopped(WAIT_S)
    assert closing.is_alive()
    gate.release()
    closing.join(WAIT_S)
    assert not closing.is_alive() and not gate.hold(0)


def test_an_error_at_a_border_is_not_held_up() -> None:
    gate = VersionGate(WAIT_S)
    gate.freeze()
    with pytest.raises(KeyError), gate.border():
        raise KeyError("no group in time")


def test_what_is_offered_is_held_once_engines_have_swapped() -> None:
    """The version before until then, for engines that come late; whoever asks for the offered one knows of the swap."""
    gate, taken = VersionGate(WAIT_S), []
    gate.open(3)
    gate.offer(4, lambda: taken.append(4))
    assert gate.hold(3) and not taken, "an engine that is started again generates by what the others have"
    gate.release()
    assert gate.hold(4) and taken == [4]
    gate.release()
    gate.take_offer()
    assert taken == [4], "once"
    assert not gate.hold(3)
    gate.offer(5, lambda: taken.append(5))
    gate.take_offer()
    assert taken == [4, 5] and gate.hold(5)
    gate.release()
    gate.offer(6, lambda: taken.append(6))
    gate.open(6)  # published at the border after all
    gate.take_offer()
    assert taken == [4, 5] and gate.hold(6)


def test_an_offer_is_not_taken_from_under_a_sender() -> None:
    gate, taken = VersionGate(0.05), []
    gate.open(3)
    gate.offer(4, lambda: taken.append(4))
    assert gate.hold(3)
    with pytest.raises(DeadlineExceeded, match="version 3 is still being sent"):
        gate.take_offer()
    assert not taken
