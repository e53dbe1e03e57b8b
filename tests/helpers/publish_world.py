"""Trainer ranks and engine workers that publish to each other as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Place
from pa_npu.config.sections.operation import Senders
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Manifest
from pa_npu.weight_transfer.receiver import Receiver
from tests.helpers.weights import Stage, gloo_group, run_threads

# the backend's own timeout comes after ours, as in join_group, and soon enough for a group that
# goes with its test
BACKEND_MARGIN_S = 3.0


class World:
    """Trainer ranks and engine workers as threads of this process, in real gloo groups."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        spec: ModelSpec,
        tp_size: int = 1,
        stages: int = 1,
        workers: int = 1,
        ep_size: int = 1,
        copies: int = 1,
        senders: Senders = "leader",
    ) -> None:
        self.spec, self.workers, self.senders = spec, workers, senders
        self.stages = [Stage(tp_size, stage, stages, ep_size, copies) for stage in range(stages)]
        self.store = dist.HashStore()
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.modules: list[torch.nn.Module] = []
        monkeypatch.setattr(transport, "join_group", self._join)
        monkeypatch.setattr(transport, "leave_group", lambda group: None)

    def _join(
        self, host: str, port: int, name: str, *, rank: int, size: int, timeout_s: float, **_: Any
    ) -> Any:
        return gloo_group(self.store, name, rank, size, timeout_s + BACKEND_MARGIN_S)

    def publishers(
        self, bucket_bytes: int = 4096, timeout_s: float = 30.0, dtype: torch.dtype = torch.float32
    ) -> list[Publisher]:
        """All trainer ranks, stage by stage; the TP leader first in each."""
        everyone = [
            (stage, rank) for stage in self.stages for rank in range(stage.copies * stage.num_ranks)
        ]
        deadline_s = timeout_s + BACKEND_MARGIN_S
        groups = run_threads(
            *(
                lambda s=stage, r=rank: gloo_group(
                    self.store,
                    f"shards of {s.stage}, copy {r // s.num_ranks}",
                    r % s.num_ranks,
                    s.num_ranks,
                    deadline_s,
                )
                for stage, rank in everyone
            )
        )
        made = []
        for (stage, rank), group in zip(everyone, groups, strict=True):
            assert isinstance(group, dist.ProcessGroup), group
            module = stage.load(self.spec, rank, dtype)
            self.modules.append(module)
            made.append(
                publisher(
                    module,
                    self.spec,
                    stage.place(rank),
                    bucket_bytes,
                    timeout_s,
                    self.server.port,
                    group,
                    self.senders,
                )
            )
        return made

    def connect(
        self, publishers: list[Publisher], timeout_s: float = 30.0, epoch: int = 0
    ) -> list[Receiver]:
        """Join trainers and engine workers; returns one Receiver per worker."""
        self.members = PublishMembers(epoch, self.workers)
        leaders = [p for p in publishers if p.is_leader]
        announced = [p.manifest() for p in leaders]
        manifests = [Manifest.from_json(entry.manifest) for entry in announced]
        size = 1 + self.workers

        def join(rank: int) -> Receiver:
            names = [transport.group_name(entry.name, epoch) for entry in announced]
            group_s = timeout_s + BACKEND_MARGIN_S
            groups = [gloo_group(self.store, name, rank, size, group_s) for name in names]
            abandonments = [
                transport.Abandonment("127.0.0.1", self.server.port, name) for name in names
            ]
            return Receiver(manifests, groups, rank, torch.device("cpu"), timeout_s, abandonments)

        results: list[Any] = run_threads(
            *(lambda p=p: p.connect(self.members) for p in leaders),
            *(lambda r=r: join(r) for r in range(1, size)),
        )
        errors = [r for r in results if isinstance(r, Exception)]
        assert not errors, errors
        return results[len(leaders) :]

    def publish(
        self, version: int, publishers: Sequence[Publisher], receivers: Sequence[Receiver]
    ) -> tuple[list[PublishStats], list[dict[str, torch.Tensor]]]:
        """Publishes a version; returns what each trainer rank says and what each worker gets."""
        results: list[Any] = run_threads(
            *(lambda p=p: p.publish(version, self.members) for p in publishers),
            *(received(receiver, version) for receiver in receivers),
        )
        errors = [result for result in results if isinstance(result, Exception)]
        assert not errors, errors
        return results[: len(publishers)], results[len(publishers) :]

    def add(self, change: float) -> None:
        """Adds `change` to every element of what the trainers train."""
        with torch.no_grad():
            for module in self.modules:
                for parameter in module.parameters():
                    parameter.add_(change)


def assert_equal_weights(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], version: int
) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"version {version}: {different}"


def publisher(
    module: torch.nn.Module,
    spec: ModelSpec,
    place: Place,
    bucket_bytes: int = 4096,
    timeout_s: float = 30.0,
    store_port: int = 1,
    tensor_group: dist.ProcessGroup | None = None,
    senders: Senders = "leader",
) -> Publisher:
    source = None
    if place.sends or place.is_publisher(senders):
        source = StageTensors(module, spec, place, bucket_bytes, tensor_group, senders=senders)
    return Publisher(
        source,
        store_host="127.0.0.1",
        store_port=store_port,
        timeout_s=timeout_s,
        backend="gloo",
        device=torch.device("cpu"),
    )


def received(receiver: Receiver, version: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: dict(receiver.receive(version))
