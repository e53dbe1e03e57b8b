"""DeviceRoles: who may use a device at each moment of an iteration, and who hears of it."""

from __future__ import annotations

from pa_npu.engines.device_roles import DeviceRoles


def test_an_engine_takes_work_until_its_device_moves_and_again_when_all_is_written() -> None:
    heard: list[bool] = []
    devices = DeviceRoles(lambda: heard.append(True))
    assert devices.takes_work(0) and devices.takes_work(None)
    devices.move({0})
    assert not devices.takes_work(0) and devices.takes_work(1), "the other one decodes on"
    assert not devices.trains({0}), "it still hands on what it has"
    devices.train({0})
    assert devices.trains({0}) and not devices.trains({0, 1}) and not devices.takes_work(0)
    devices.train({1})
    devices.all_written()
    assert devices.takes_work(0) and devices.trains({0, 1})
    heard.clear()
    devices.decode_all()
    assert heard, "who waits for room looks again"
    assert devices.takes_work(0) and not devices.trains({0}) and not devices.trains({1})
    devices.move({1})
    assert not devices.takes_work(1), "what was written ends with its iteration"


def test_a_device_is_lent_once_and_taken_back_with_all_others() -> None:
    devices = DeviceRoles(lambda: None)
    assert not devices.any_lent
    assert devices.lend({0, 1}) == {0, 1} and devices.lend({1, 2}) == {2}
    assert devices.is_lent(1) and not devices.is_lent(3)
    devices.decode_all()
    assert devices.any_lent, "memory comes back with a publish, not with an iteration"
    assert devices.return_all() == {0, 1, 2}
    assert not devices.any_lent and devices.return_all() == set()
