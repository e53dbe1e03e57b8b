"""The engine's end of a publish: joins the senders' groups, receives every bucket, returns HF tensors.

All senders send at the same time, and their buckets are taken in turn, so that each link is busy.

It knows nothing of any engine: code inside an engine calls it and gives the tensors to its loader.
What never changes (Manifest.sent_once) comes with the first version only.
A version may also arrive in the background, in memory of its own, as many bytes as the weights
have, until the engine swaps to it. Imports torch and msgspec only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.errors import DeadlineExceeded
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.adapters import BaseDirectory
from pa_npu.weight_transfer.digest import Digests, KeptDigests
from pa_npu.weight_transfer.manifest import (
    Assembler,
    Bucket,
    Manifest,
    assemblers,
    check_covered,
)
from pa_npu.weight_transfer.transport import Abandonment, Deadline, WeightSyncError

HEAD = "lm_head.weight"
# Broadcasts posted ahead of the one being loaded, so that the wire does not wait for the loader; of
# several senders, one of each is posted in addition.
_AHEAD = 2
# Polls for the beginning of a publish, which is noticed late by half a percent of the wait at most.
_OF_THE_BEGINNING: transport.Polls = (0.02, 0.005)

Received = tuple[list[tuple[str, torch.Tensor]], tuple[str, ...]]
"""(HF name, tensor) of all that was sent, and the digests of each sender."""


def is_embedding(name: str) -> bool:
    """Returns whether this is the name of a model's embedding of tokens: model.embed_tokens.weight,
    or in a model that reads images model.language_model.embed_tokens.weight.
    """
    return name.startswith(("model.", "language_model.")) and name.endswith("embed_tokens.weight")


def is_head(name: str) -> bool:
    """Returns whether this is the name of a model's LM head: lm_head.weight, or in a model that
    reads images language_model.lm_head.weight.
    """
    return name == HEAD or name.endswith(f".{HEAD}")


@dataclass(frozen=True)
class Message:
    """One broadcast of a sender: its header (no bucket) or a bucket.

    sender: its number among the manifests. buffer: filled once the broadcast has arrived.
    """

    sender: int
    manifest: Manifest
    assembler: Assembler
    bucket: Bucket | None
    buffer: torch.Tensor
    name: str


class Receiver:
    """Reads the buckets of all senders in turn, and puts the HF tensors together."""

    def __init__(
        self,
        manifests: list[Manifest],
        groups: Sequence[Any],
        rank: int,
        device: torch.device,
        timeout_s: float,
        abandonments: list[Abandonment] | None = None,
        base: BaseDirectory | None = None,
    ) -> None:
        self._manifests = manifests
        self._base = base
        self._abandonments = abandonments or []
        self._groups = groups
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._unfinished = False  # broadcasts may be pending
        self._digests: list[Digests] = []
        self._has_whole = False  # a version with all buckets has arrived
        self._kept_digests = [KeptDigests(manifest.once) for manifest in manifests]
        self._prepared: tuple[int, Future[Received]] | None = None

    @classmethod
    def join(
        cls,
        joined: Mapping[str, Any],
        worker: int,
        device: torch.device,
        model: object,
        directory: str,
    ) -> Receiver:
        """Joins one group per sender; blocks until the senders are there.

        Args:
            joined: pa_npu.engines.protocol.WeightGroups as JSON.
            worker: of the engine, from 0 on.
            device: of the engine's tensors.
            model: the engine's configuration of its model, with the names of HF's config.json as
                attributes.
            directory: of the engine's model; adapters that are sent alone are merged into its
                weights.

        Raises WeightSyncError if that is another model or the groups cannot be joined, and
        DeadlineExceeded.
        """
        manifests = [Manifest.from_json(stage["manifest"]) for stage in joined["stages"]]
        check_model(manifests, model)
        bases = []
        for manifest in manifests:
            if manifest.base is not None:
                bases.append(BaseDirectory(manifest.base, directory, device))
        names = [str(stage["name"]) for stage in joined["stages"]]
        rank = joined["first_rank"] + worker
        backend = joined["backend"]
        timeout_s = joined["timeout_s"]
        host, port = joined["store"]
        groups: list[Any] = []
        try:
            for name, manifest in zip(names, manifests, strict=True):
                describe = f"engine worker {rank} receives from trainer {manifest.sender}"
                group = transport.join_group(
                    host,
                    port,
                    name,
                    rank=rank,
                    size=joined["world_size"],
                    backend=backend,
                    device=device,
                    timeout_s=timeout_s,
                    describe=describe,
                )
                groups.append(group)
        except (WeightSyncError, DeadlineExceeded):
            for group in groups:
                transport.drop_group(group, device)
            raise
        abandonments = [Abandonment(host, port, name) for name in names]
        # An engine on a trainer's device receives in host memory; its loader takes tensors from
        # there as from a file.
        memory = torch.device("cpu") if backend == transport.HOST_BACKEND else device
        return cls(
            manifests=manifests,
            groups=groups,
            rank=rank,
            device=memory,
            timeout_s=timeout_s,
            abandonments=abandonments,
            base=bases[0] if bases else None,
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of every bucket as of the last `receive`, one text per sender (Digests.read).

        Those of buckets that are sent once are of the first one.
        """
        return tuple(
            kept.whole(digests.read())
            for kept, digests in zip(self._kept_digests, self._digests, strict=True)
        )

    def is_sent_once(self, name: str) -> bool:
        """Returns whether a weight of this name comes with the first version only."""
        return any(manifest.is_sent_once(name) for manifest in self._manifests)

    @property
    def is_tied(self) -> bool:
        """Returns whether the LM head is the embedding, so that the trainer sends no head."""
        return all(HEAD not in manifest.loaded for manifest in self._manifests)

    @property
    def merges(self) -> bool:
        """Returns whether the tensors that the trainers send are merged into weights of the engine."""
        return self._base is not None

    def whole(
        self, received: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns (HF name, tensor) of all weights, as an engine loads them.

        They are the received ones, or those that the received ones are merged into.
        """
        if self._base is None:
            return iter(received)
        return self._base.merged(received)

    def receive(
        self, version: int, *, begins_within_s: float | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, tensor) of all that is sent (`whole` makes weights of it).

        The first version has all weights, later ones leave out what is sent once. Each tensor may
        be kept: buffers are not used again. A bucket's digest covers the data that is given to the
        engine's loader. Only log-probs show the loader's work (vLLM packs weights for its kernels).

        `begins_within_s`: seconds until the trainers send; the deadline of the publish counts from
        there. None: they are about to send.
        """
        if begins_within_s is not None:
            self._wait_for_begin(version, begins_within_s)
        deadline = Deadline(self._timeout_s, self._given_up)
        self._unfinished = True
        self._digests = [Digests() for _ in self._manifests]
        for message in self._messages(version, deadline):
            if message.bucket is None:
                self._check_header(message.buffer, message.manifest, version)
            else:
                self._digests[message.sender].add(message.buffer)
                yield from message.assembler.completed(message.bucket, message.buffer)
        self._unfinished = False
        self._has_whole = True

    def prepare(self, version: int) -> None:
        """Receives `version` in a thread, which ends by the publish's deadline or abandonment.

        Raises WeightSyncError while another version is being received.
        """
        if self._prepared is not None and not self._prepared[1].done():
            raise WeightSyncError(
                f"weight version {self._prepared[0]} is still being received; one at a time"
            )
        arriving: Future[Received] = Future()
        self._prepared = version, arriving
        threading.Thread(
            target=self._receive_all,
            args=(version, arriving),
            name=f"weight version {version}",
            daemon=True,
        ).start()

    def prepared(self, version: int) -> tuple[str, ...] | None:
        """Returns the digests of each sender once all of `version` has arrived; None before.

        Raises what went wrong with it.
        """
        last, arriving = self._prepared or (None, None)
        if last != version or arriving is None:
            raise WeightSyncError(
                f"weight version {version} was never asked for, or given up; the last one is {last}"
            )
        return arriving.result()[1] if arriving.done() else None

    def pop_prepared(self, version: int) -> Received:
        """Returns the prepared weights, which belong to the caller from here on.

        Raises WeightSyncError until they have arrived.
        """
        if self.prepared(version) is None:
            raise WeightSyncError(f"weight version {version} is still being received")
        assert self._prepared is not None
        _, arrived = self._prepared
        self._prepared = None
        return arrived.result()

    @torch.no_grad()
    def _receive_all(self, version: int, arriving: Future[Received]) -> None:
        try:
            # In memory of their own, aligned as an engine's, so that kernels compute the same bits
            # whichever way a version came.
            weights = [(name, tensor.clone()) for name, tensor in self.receive(version)]
            arriving.set_result((weights, self.digests))
        except Exception as error:  # raised in `prepared`
            arriving.set_exception(error)

    def close(self) -> None:
        for group in self._groups:
            if self._unfinished:
                transport.drop_group(group, self._device)
            else:
                transport.leave_group(group)
        self._groups = []

    def _wait_for_begin(self, version: int, within_s: float) -> None:
        """Waits until the first sender is about to send. The others are told at the same time.

        Raises DeadlineExceeded, or WeightSyncError if the publish is given up.
        """
        transport.wait_until(
            lambda: transport.has_begun(self._groups[0], version),
            Deadline(within_s, self._given_up),
            _OF_THE_BEGINNING,
            f"engine worker {self._rank} waits for the trainers to begin with weight version "
            f"{version}",
            "look at the trainers' logs, or raise trainer.wait_timeout_s",
            late=lambda: "they did not",
        )

    def _given_up(self) -> str | None:
        for abandonment in self._abandonments:
            if reason := abandonment.reason():
                return reason
        return None

    def _messages(self, version: int, deadline: Deadline) -> Iterator[Message]:
        """Yields header and buckets of each sender in the order of sending, one of each in turn.

        The next ones are always posted already. All workers post them in the same order, as
        backends want it of collectives in several groups.
        """
        pending: deque[tuple[dist.Work, Message]] = deque()
        ahead = _AHEAD + len(self._manifests) - 1
        by_stage = assemblers(self._manifests)
        sent = [manifest.sent(whole=not self._has_whole) for manifest in self._manifests]
        longest = max((len(buckets) for buckets in sent), default=0)
        for turn in range(1 + longest):
            for sender, (group, manifest) in enumerate(
                zip(self._groups, self._manifests, strict=True)
            ):
                if turn > len(sent[sender]):
                    continue
                if len(pending) > ahead:
                    yield self._arrived(*pending.popleft(), version, deadline)
                assembler = by_stage[manifest.stage]
                message = self._message(sender, manifest, assembler, sent[sender], turn)
                pending.append((transport.broadcast(group, message.buffer), message))
        while pending:
            yield self._arrived(*pending.popleft(), version, deadline)

    def _message(
        self,
        sender: int,
        manifest: Manifest,
        assembler: Assembler,
        sent: tuple[Bucket, ...],
        number: int,
    ) -> Message:
        """Returns what a sender sends as its message of this number: number 0 is the header, and
        its buckets of this version, `sent`, follow.
        """
        if number == 0:
            header = torch.empty(3, dtype=torch.int64, device=self._device)
            name = f"{manifest.sender}, header"
            return Message(sender, manifest, assembler, None, header, name)
        bucket = sent[number - 1]
        buffer = assembler.buffer(bucket, self._device)
        count = f"bucket {number} of {len(sent)}"
        name = f"{manifest.sender}, {count} ({bucket.summary})"
        return Message(sender, manifest, assembler, bucket, buffer, name)

    def _arrived(
        self, work: dist.Work, message: Message, version: int, deadline: Deadline
    ) -> Message:
        transport.wait(
            work,
            deadline,
            f"engine worker {self._rank} waits for weight version {version}, {message.name}",
            "check in the trainer's log that it is alive and publishing, or raise "
            "publish.timeout_s",
        )
        return message

    def _check_header(self, header: torch.Tensor, manifest: Manifest, version: int) -> None:
        sent_version, digest, num_buckets = header.tolist()
        if sent_version != version:
            raise WeightSyncError(
                f"trainer {manifest.sender} sent weight version {sent_version} to engine "
                f"worker {self._rank}, which was asked to load version {version}; publishes and "
                "pa_receive calls must come in the same order"
            )
        num_expected = len(manifest.sent(whole=not self._has_whole))
        if num_buckets != num_expected:
            raise WeightSyncError(
                f"trainer {manifest.sender} sends {num_buckets} buckets of weight version "
                f"{version} to engine worker {self._rank}, which expects {num_expected}: they "
                "disagree on whether it has what is sent once; connect the engine again"
            )
        if digest != manifest.digest:
            raise WeightSyncError(
                f"trainer {manifest.sender} sends other buckets than the manifest that engine "
                f"worker {self._rank} was given; call pa_connect with the manifest of this run"
            )


def check_model(manifests: list[Manifest], hf_config: Any) -> None:
    """Raises WeightSyncError unless trainer and engine have the same model.

    Each tensor must come from one stage, and all of it from the stage's senders.
    """
    check_covered(manifests)
    for manifest in manifests:
        for key, value in manifest.model.items():
            if int(getattr(hf_config, key, value)) != value:
                raise WeightSyncError(
                    f"trainer {manifest.sender} has {key}={value}, the engine's model "
                    f"{getattr(hf_config, key)}; engine and trainer must be given the same model "
                    "directory"
                )
