"""Sockets of the launcher listen on loopback; sockets that do not are the control."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import host_store
from tests.helpers.sockets import listening, outside_loopback

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's table of sockets is read from /proc"
)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_check_sees_a_socket_and_whether_others_can_reach_it(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError as error:
            pytest.skip(f"{address} is not here: {error}")
        listener.listen()
        mine = (os.getpid(), address, listener.getsockname()[1])
        assert mine in listening([os.getpid()])
        assert (mine in outside_loopback(listening([os.getpid()]))) == (
            address in ("0.0.0.0", "::")
        )


def test_store_listens_on_the_given_address_alone_where_torch_takes_all():
    before = listening([os.getpid()])
    store = host_store(Config.model_fields["placement"].get_default().address, 0)
    assert listening([os.getpid()]) - before == {(os.getpid(), "127.0.0.1", store.port)}

    before = listening([os.getpid()])
    exposed = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (actual,) = listening([os.getpid()]) - before
    assert actual[2] == exposed.port and outside_loopback([actual]), (
        "then host_store need not bind a socket itself"
    )
