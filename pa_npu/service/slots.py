"""A client's model as a slot: weights, moments and gradient that are loaded into the one backend when it is its turn.

    slot "a"   weights, moments, gradient, updates   (this rank's, on the host)
    slot "b"   the same                                  ──loaded──>  backend  ──step──>  back into the slot

Everything goes through the training backend's protocol: what is stepped is read and written through
SteppedTensor, gradients are undivided sums of one call and are added up here until the step. With
lora.rank a slot is a set of adapters over weights that all slots share; without, a whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pa_npu.algorithm.model_outputs import Outputs, Targets, token_batch
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.backends.protocol import Step, StepOptions, TrainBackend
from pa_npu.checkpoints.whole_files import write_whole
from pa_npu.config.plain_file import reason
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import Traffic
from pa_npu.service.datums import DEFAULT_TOKENS, microbatches
from pa_npu.service.losses import OWNER, PLACE, ServedLoss, loss_named
from pa_npu.service.ranks import Ranks
from pa_npu.service.wire import AdamParameters, ForwardBackward, Refused
from pa_npu.trainer.invariants import GradientSum
from pa_npu.weight_transfer.digest import digest_of

WEIGHTS, MEAN, SQUARE, GRADIENT = "weights", "mean", "square", "gradient"
_A = ".lora_A."


class ServedBackend(TrainBackend, Protocol):
    """A training backend whose steps take their options one by one."""

    def step(self, options: StepOptions | None = None) -> Step: ...


Tensors = dict[str, torch.Tensor]


@dataclass
class Slot:
    """parts: tensors by part and name; the gradient is there once a call has been accumulated."""

    parts: dict[str, Tensors]
    updates: int = 0
    calls: int = 0


@dataclass(frozen=True, eq=False)
class CallOutputs:
    """logprobs: of every datum, in the shape of its targets. loss: the undivided sum."""

    logprobs: list[npt.NDArray[np.float32]]
    loss: float


class Slots:
    """All slots of this rank. Every method is collective over trainer ranks."""

    def __init__(self, config: Config, backend: ServedBackend, base: str = "") -> None:
        self._config = config
        self._backend = backend
        self.base = base
        """Digest of what all slots begin with; set before anything is saved or loaded."""
        self._rank = AdapterShape.from_config(config).rank
        self._slots: dict[str, Slot] = {}
        self._active: str | None = None
        self._shown: tuple[Path, str] | None = None
        """The file whose weights the backend has, and their digest."""
        self._initial: Tensors = {
            tensor.name: tensor.weights.clone() for tensor in backend.stepped()
        }
        self.ranks = Ranks(self._initial)

    def create(self, name: str, seed: int) -> None:
        """Makes a slot with the model's own weights, or with fresh adapters by `seed`: A uniform
        within 1 / sqrt(its inputs), as peft begins, and B zero; or with those of model.adapter.
        """
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for tensor_name, initial in self._initial.items():
            weights[tensor_name] = initial.clone()
            if _A in tensor_name and not self._config.model.adapter:
                size = self.ranks.size(tensor_name)
                bound = 1.0 / math.sqrt(size / self._rank)
                values = torch.empty(size).uniform_(-bound, bound, generator=generator)
                weights[tensor_name].copy_(self.ranks.part(tensor_name, values))
        self._slots[name] = Slot(
            {
                WEIGHTS: weights,
                MEAN: {key: torch.zeros_like(value) for key, value in weights.items()},
                SQUARE: {key: torch.zeros_like(value) for key, value in weights.items()},
            }
        )
        self._forget(name)

    def drop(self, name: str) -> None:
        self._slots.pop(name, None)
        self._forget(name)

    def forward(self, name: str, call: ForwardBackward) -> CallOutputs:
        """Returns what a call's loss is, and changes nothing. Raises Refused."""
        algorithm, source = self._prepared(call)
        self._activate(name)
        collected = _Logprobs(call, source)
        loss = torch.zeros((), dtype=torch.float64)

        def on_outputs(microbatch: Microbatch, outputs: Outputs) -> None:
            collected.add(0, microbatch.sources, microbatch.response_lengths, outputs.policy.values)
            loss.add_(algorithm.loss_sums(_batch(microbatch, outputs)).loss.double().cpu())

        self._backend.evaluate(list(source), on_outputs)
        return collected.outputs(sum(self.ranks.all_of(float(loss), float)), self.ranks)

    def forward_backward(self, name: str, call: ForwardBackward) -> CallOutputs:
        """Adds a call's gradient to the slot's. Raises Refused if it is not finite: the slot keeps
        what it had. Raises InvariantViolation unless every datum's gradient passed once (I2),
        and what ranks brought is what their sum has (I7).
        """
        algorithm, source = self._prepared(call)
        slot = self._slot(name)
        self._activate(name)
        collected = _Logprobs(call, source)
        objective = Objective(
            config=self._config,
            device=self._backend.device,
            keep=collected.add,
            algorithm=algorithm,
        )
        reduced = self._backend.accumulate(_Ready(source, self._backend.device), objective)
        objective.finish()
        numbers = self.ranks.all_of([response.number for response in objective.trained], list[int])
        trained = sorted(number for of_rank in numbers for number in of_rank)
        if trained != list(range(len(call.data))):
            raise InvariantViolation(
                f"I2: a call of {len(call.data)} datums has trained {len(trained)}, or one of them "
                "twice; look for what runs a backward twice or not at all"
            )
        gradients = {}
        for tensor in self._backend.stepped():
            assert tensor.gradient is not None, "a backward reaches every weight"
            gradients[tensor.name] = tensor.gradient
        loss = objective.sums.total("loss", self._backend.reductions)
        refusal = None
        if not all(torch.isfinite(gradient).all() for gradient in gradients.values()):
            refusal = (
                "forward_backward: the gradient is not finite, and was not added; look at the "
                "datums' log-probs, advantages and weights"
            )
        self.ranks.agree(refusal)
        GradientSum(f"a call of {name}").check_reduced(
            reduced, self.ranks.num_ranks, self._backend.reductions
        )
        kept = slot.parts.get(GRADIENT)
        if kept is None:
            slot.parts[GRADIENT] = {key: value.clone() for key, value in gradients.items()}
        else:
            for key, gradient in gradients.items():
                kept[key] += gradient
        slot.calls += 1
        return collected.outputs(loss, self.ranks)

    def step(self, name: str, adam: AdamParameters) -> dict[str, float]:
        """Clips and applies the slot's gradient, which is zero afterwards. Returns metrics.

        Raises Refused where nothing has been accumulated, or the result is not finite.
        """
        slot = self._slot(name)
        gradients = slot.parts.get(GRADIENT)
        if gradients is None:
            raise Refused(
                "optim_step: nothing was accumulated since the last step; call forward_backward "
                "before it"
            )
        self._activate(name)
        tensors = self._backend.stepped()
        if any(tensor.gradient is None for tensor in tensors):
            algorithm = ServedLoss(self._config, *loss_named("cross_entropy", {}))
            nothing = Objective(
                config=self._config, device=self._backend.device, algorithm=algorithm
            )
            self._backend.accumulate(_Ready([]), nothing)
            tensors = self._backend.stepped()
        for tensor in tensors:
            assert tensor.gradient is not None, "an empty update has a gradient of 0"
            tensor.gradient.copy_(gradients[tensor.name])
        options = StepOptions(
            learning_rate=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            epsilon=adam.eps,
            weight_decay=adam.weight_decay,
            clip_norm=max(0.0, adam.grad_clip_norm),
            updates=slot.updates,
        )
        step = self._backend.step(options)
        del slot.parts[GRADIENT]
        stepped = self._backend.stepped()
        finite = math.isfinite(step.grad_norm) and all(
            bool(torch.isfinite(tensor.weights).all()) for tensor in stepped
        )
        refusal = None
        if not finite:
            refusal = (
                f"optim_step: the gradient's norm is {step.grad_norm} or weights are not finite "
                "after it; the gradient was dropped and the weights are as before"
            )
        try:
            self.ranks.agree(refusal)
        except Refused:
            self._forget(name)  # the slot has the weights from before
            raise
        for tensor in stepped:
            assert tensor.mean is not None and tensor.square is not None, "it has just stepped"
            slot.parts[WEIGHTS][tensor.name].copy_(tensor.weights)
            slot.parts[MEAN][tensor.name].copy_(tensor.mean)
            slot.parts[SQUARE][tensor.name].copy_(tensor.square)
        slot.updates += 1
        slot.calls = 0
        return {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}

    def digest(self, name: str) -> str:
        """Digest of the slot's weights."""
        return digest_of(self.ranks.joined(self._slot(name).parts[WEIGHTS]).values())

    def save(self, name: str, file: Path, parts: Sequence[str]) -> str:
        """Writes parts of a slot into a file, which is there as a whole or not at all; the first
        rank writes, whole tensors. Returns the digest of the weights. Raises Refused.
        """
        slot = self._slot(name)
        tensors = {}
        for part in parts:
            if part in slot.parts:
                for key, tensor in self.ranks.joined(slot.parts[part]).items():
                    tensors[f"{part}/{key}"] = tensor.contiguous()
        digest = self.digest(name)
        if self.ranks.rank != 0:
            return digest
        described = {
            "base": self.base,
            "digest": digest,
            "updates": slot.updates,
            "calls": slot.calls,
            "rank": self._rank,
        }
        try:
            write_whole(file, save(tensors, metadata={"pa_npu": json.dumps(described)}))
        except OSError as error:
            raise Refused(f"save: {file.name} cannot be written ({reason(error)})") from None
        return digest

    def load(self, name: str, file: Path, with_optimizer: bool) -> None:
        """Fills a slot from a file. Without the optimizer the moments are zero. Raises Refused."""
        slot = self._slot(name)
        parts, described = self._read(file)
        if with_optimizer and MEAN not in parts:
            raise Refused(
                f"load_weights: {file.name} has no optimizer state; load its weights alone"
            )
        for part in (WEIGHTS, MEAN, SQUARE):
            for key, tensor in slot.parts[part].items():
                if part == WEIGHTS or with_optimizer:
                    tensor.copy_(self.ranks.part(key, parts[part][key]))
                else:
                    tensor.zero_()
        slot.parts.pop(GRADIENT, None)
        if with_optimizer and GRADIENT in parts:
            slot.parts[GRADIENT] = {
                key: self.ranks.part(key, whole).clone() for key, whole in parts[GRADIENT].items()
            }
        slot.updates = described["updates"] if with_optimizer else 0
        slot.calls = described["calls"] if with_optimizer else 0
        self._forget(name)

    def show(self, file: Path) -> str:
        """Puts a file's weights into the backend, to be published; no slot is active then. Returns
        their digest. Raises Refused.
        """
        if self._shown is not None and self._shown[0] == file:
            return self._shown[1]
        parts, described = self._read(file)
        self.forget_active()
        for tensor in self._backend.stepped():
            tensor.weights.copy_(self.ranks.part(tensor.name, parts[WEIGHTS][tensor.name]))
        self._backend.share_weights()
        digest = digest_of(parts[WEIGHTS][key] for key in self._initial)
        if digest != described["digest"]:
            raise Refused(f"sample: {file.name} has other weights than were saved; save them again")
        self._shown = (file, digest)
        return digest

    def export(self, file: Path, directory: Path) -> None:
        """Writes a file's weights as an HF directory: of peft, or whole with
        checkpoint.export_hf=merged. Raises Refused or ExportError.
        """
        self.show(file)
        self._backend.export(directory)

    def _read(self, file: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """Returns whole tensors by part, and what the file says of them. Raises Refused on all
        ranks if one cannot read it.
        """
        refusal = None
        parts: dict[str, Tensors] = {}
        described: dict[str, Any] = {}
        try:
            parts, described = self._read_here(file)
        except Refused as error:
            refusal = str(error)
        self.ranks.agree(refusal)
        return parts, described

    def _read_here(self, file: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
        parts: dict[str, Tensors] = {}
        try:
            with safe_open(str(file), "pt") as stored:
                described = json.loads((stored.metadata() or {})["pa_npu"])
                for key in stored.keys():  # noqa: SIM118  # it is no mapping
                    part, _, name = key.partition("/")
                    parts.setdefault(part, {})[name] = stored.get_tensor(key)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            cause = reason(error) if isinstance(error, OSError) else type(error).__name__
            raise Refused(f"load: {file.name} cannot be read ({cause}); save it again") from None
        if described["base"] != self.base:
            raise Refused(
                f"load: {file.name} belongs to another base model or another rank than this "
                "server's; serve the model that it was trained from"
            )
        for tensors in parts.values():
            if tensors.keys() != self._initial.keys():
                raise Refused(f"load: {file.name} has other tensors than this server's model")
        return parts, described

    def _prepared(self, call: ForwardBackward) -> tuple[ServedLoss, list[Microbatch]]:
        loss, values = loss_named(call.loss, call.config)
        config = self._config
        source = microbatches(
            call.data,
            loss,
            max_tokens=config.microbatch.budget or DEFAULT_TOKENS,
            shared=config.attention.shared_prompt,
            pad_multiple=config.trainer.pad_multiple,
            share=self.ranks.share,
        )
        return ServedLoss(config, loss, values), source

    def _slot(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            raise Refused(f"model_id: {name[:80]!r} has no slot here")
        return slot

    @torch.no_grad()
    def _activate(self, name: str) -> None:
        """Lets the backend compute with a slot's weights and moments."""
        slot = self._slot(name)
        if self._active == name:
            return
        self.forget_active()
        for tensor in self._backend.stepped():
            assert tensor.mean is not None and tensor.square is not None, "made with the optimizer"
            tensor.weights.copy_(slot.parts[WEIGHTS][tensor.name])
            tensor.mean.copy_(slot.parts[MEAN][tensor.name])
            tensor.square.copy_(slot.parts[SQUARE][tensor.name])
        self._backend.share_weights()
        self._active = name

    def forget_active(self) -> None:
        """Says that something failed in the backend, so that it must be given a slot's tensors anew."""
        self._active = None
        self._shown = None

    def _forget(self, name: str) -> None:
        """The backend has this slot's tensors no longer as they are."""
        if self._active == name:
            self._active = None


class _Logprobs:
    """The log-probs of a call's targets, as the backend gives them, microbatch by microbatch."""

    def __init__(self, call: ForwardBackward, source: Sequence[Microbatch]) -> None:
        self._call = call
        self._source = {microbatch.sources: microbatch for microbatch in source}
        self._parts: dict[int, npt.NDArray[np.float32]] = {}

    def add(
        self,
        iteration: int,
        sources: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        logprobs: torch.Tensor,
    ) -> None:
        columns = self._source[tuple(sources)].columns
        values = logprobs.detach().float().cpu().numpy()[columns[PLACE].cpu().numpy()]
        owners = columns[OWNER].cpu().numpy()
        starts = np.searchsorted(owners, np.arange(1, len(sources)))
        for (_, number), part in zip(sources, np.split(values, starts), strict=True):
            self._parts[number] = part

    def outputs(self, loss: float, ranks: Ranks) -> CallOutputs:
        """Returns what all ranks have computed of the call. Collective."""
        parts: dict[int, npt.NDArray[np.float32]] = {}
        mine = {number: values.tobytes() for number, values in self._parts.items()}
        for of_rank in ranks.all_of(mine, dict[int, bytes]):
            parts |= {number: np.frombuffer(data, np.float32) for number, data in of_rank.items()}
        arrays = []
        for number, datum in enumerate(self._call.data):
            arrays.append(parts[number].reshape(datum.inputs["target_tokens"].shape))
        return CallOutputs(arrays, loss)


class _Ready(Iterator[Microbatch]):
    """A MicrobatchSource of a call, whose datums are all there."""

    waited_s = 0.0
    traffic = Traffic()
    is_last = False
    advantages: Mapping[int, Sequence[np.ndarray]] = {}
    by_rule = ()

    def __init__(self, source: Iterable[Microbatch], device: torch.device | None = None) -> None:
        self._source = iter(source)
        self._device = device

    def settle(self) -> int:
        return 1

    def __next__(self) -> Microbatch:
        microbatch = next(self._source)
        return microbatch if self._device is None else microbatch.to(self._device)


def _batch(microbatch: Targets, outputs: Outputs) -> TokenBatch:
    values = outputs.policy.values
    return token_batch(
        microbatch,
        outputs,
        old_logprobs=values.detach(),
        weights=torch.ones_like(values),
        group_size=1,
    )
