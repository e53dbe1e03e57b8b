"""Everything that is called of Ray: connecting, reserving nodes, host actors and calls to them. The launcher imports it here alone.

Every wait has a deadline, and what Ray raises comes out as a UserError before the run, or as
HostGone for an actor that is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pa_npu.errors import ConfigError, PaNpuError, UserError
from pa_npu.launcher.cluster.host import HostActor

# A cluster that is there answers within a second or two; Ray's own retries take minutes.
_REACH_S = 10.0
_CONNECT_S = 60.0
_ADDRESS = "RAY_ADDRESS"
"""Ray's own variable for a cluster that this machine does not belong to."""
_THREADS_PER_HOST = 4
# A host actor's keepers end what it started when it ends. Ray by default kills the actor's children
# first, the keepers, whose grandchildren would then live on.
# https://docs.ray.io/en/latest/ray-core/user-spawn-processes.html
_HOST_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}


class HostGone(PaNpuError):
    """A host actor has died, or Ray cannot reach it any more."""


class HostFailed(PaNpuError):
    """A call to a host actor raised."""


@contextmanager
def connected(host: type[HostActor] = HostActor) -> Iterator[RayConnection]:
    """A connection to the cluster of RAY_ADDRESS, else to this machine's, closed in the end; the
    cluster itself stays.

    host: what runs on its nodes.

    Raises ConfigError where Ray is not installed, UserError where no cluster answers in time.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "placement.cluster: ray, but Ray is not installed here; pip install -e '.[ray]', or "
            "set placement.cluster=local"
        ) from None
    address = os.environ.get(_ADDRESS, "auto")
    _check_reachable(address)
    _initialise(ray, address)
    try:
        yield RayConnection(ray, host)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """A plain connection first: Ray tries for minutes where nothing listens."""
    if address in ("auto", "local"):
        return
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{_ADDRESS}: {address!r} is not HOST:PORT; give the head's, such as 10.0.0.1:6379, or "
            "unset it for this machine's"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise UserError(
            f"{_ADDRESS}: no Ray cluster answers at {address} ({error.strerror or error}); start "
            "one there (ray start --head), or correct the address"
        ) from None


def _initialise(ray: Any, address: str) -> None:
    """Connects in a thread, because Ray sets signal handlers in the main one and has no deadline
    for the connection.
    """
    failed: list[BaseException] = []

    def initialise() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # raised as one line below
            failed.append(error)

    thread = threading.Thread(target=initialise, name="ray.init", daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    if not thread.is_alive() and not failed:
        return
    reason = f"not within {_CONNECT_S:.0f} s" if thread.is_alive() else _first_line(failed[0])
    raise UserError(
        f"{_ADDRESS}: {address}: cannot join the Ray cluster ({reason}); start the launcher on one "
        "of its nodes, where `ray status` works, with the Ray and Python of the cluster"
    )


class RayConnection:
    """A connection to one cluster. Handles and references that it returns mean something to it
    alone.
    """

    def __init__(self, ray: Any, host: type[HostActor]) -> None:
        self._ray = ray
        self._host = host

    @property
    def address(self) -> str:
        """Returns this machine's address in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def nodes(self) -> list[tuple[str, dict[str, float]]]:
        """(address, resources) of the nodes that are alive."""
        return [
            (node["NodeManagerAddress"], node["Resources"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def free(self, resource: str) -> float:
        """Returns how much of a resource nobody has reserved, in the whole cluster."""
        return float(self._ray.available_resources().get(resource, 0.0))

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> Any:
        """Ask for these resources, each on a node of its own."""
        from ray.util import placement_group

        return placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_SPREAD")

    def is_reserved(self, group: Any) -> bool:
        from ray.util import placement_group_table

        return bool(placement_group_table(group)["state"] == "CREATED")

    def release(self, group: Any) -> None:
        from ray.util import remove_placement_group

        with contextlib.suppress(self._ray.exceptions.RayError):
            remove_placement_group(group)

    def make_host(
        self, name: str, resources: Mapping[str, float], group: Any = None, bundle: int = -1
    ) -> Any:
        """Returns a host actor with these resources, in a bundle of a reserved group if one is
        given; it exists when it first answers.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        named = {"CPU": "num_cpus", "GPU": "num_gpus"}
        options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
        for resource, amount in resources.items():
            if resource in named:
                options[named[resource]] = amount
            else:
                options["resources"][resource] = amount
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            )
        return (
            self._ray.remote(self._host)
            .options(
                **options,
                max_concurrency=_THREADS_PER_HOST,
                max_restarts=0,
                runtime_env={"env_vars": dict(_HOST_ENVIRONMENT)},
            )
            .remote()
        )

    def call(self, host: Any, method: str, *arguments: Any) -> Any:
        """Returns a reference to the result of a call that has begun."""
        return getattr(host, method).remote(*arguments)

    def done(self, references: Sequence[Any], timeout_s: float = 0.0) -> list[Any]:
        """Waits until all calls have ended, or timeout_s, and returns the references of those that
        have, well or not.
        """
        if not references:
            return []
        ready, _ = self._ray.wait(
            list(references), num_returns=len(references), timeout=timeout_s, fetch_local=False
        )
        return list(ready)

    def result(self, reference: Any, timeout_s: float) -> Any:
        """Raises HostGone when the actor is lost or silent for timeout_s, HostFailed when the call
        raised.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except errors.RayTaskError as error:
            raise HostFailed(_first_line(error.cause or error)) from None
        except errors.GetTimeoutError:
            raise HostGone(f"it has not answered for {timeout_s:g} s") from None
        except errors.RayError as error:
            raise HostGone(_first_line(error)) from None

    def end(self, host: Any) -> None:
        """The actor's process ends, and with it all that it started."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(host)


def _first_line(error: BaseException) -> str:
    """Ray's messages have paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
