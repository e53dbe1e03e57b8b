"""Accepts requests: checked in full, within the client's limits, written to the log, then acknowledged by an id."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pa_npu.config.schema import Config
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.service import wire
from pa_npu.service.datums import check_datums
from pa_npu.service.intake import Intake
from pa_npu.service.log import Ended
from pa_npu.service.losses import loss_named
from pa_npu.service.provenance import check_provenance
from pa_npu.service.registry import Model, Registry
from pa_npu.service.wire import Refused

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_SECONDS_IN_10_YEARS = 10 * 366 * 86400


@dataclass(frozen=True)
class Subject:
    """What the server trains. max_tokens: of a datum, and of a prompt with its response. adapters: of
    rank 0 where all weights are trained.
    """

    vocab_size: int
    max_tokens: int
    adapters: AdapterShape


class Acceptance:
    """Takes requests of clients in. write: appends to the log and to the registry."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        subject: Subject,
        write: Callable[..., None],
        directory: Path,
    ) -> None:
        self._config = config
        self._keys = config.service
        self._registry = registry
        self._subject = subject
        self._write = write
        self._intake = Intake(registry, config.service.pending, write)
        self._directory = directory
        self._seen_s: dict[str, float] = {}

    # Sessions

    def create_session(self, asked: wire.CreateSession) -> str:
        wire.check_sdk(asked.sdk_version)
        if len(self._registry.sessions) >= self._keys.sessions:
            raise Refused(
                f"create_session: {self._keys.sessions} sessions are open (service.sessions); "
                "close one, or wait until one that is idle ends",
                429,
            )
        id = f"s-{secrets.token_hex(8)}"
        self._intake.accept("session", id, id, b"")
        self.touch(id)
        return id

    def touch(self, session: str) -> None:
        """Notes that a session's client is there."""
        self._seen_s[session] = time.monotonic()

    def heartbeat(self, session: str) -> None:
        """Raises Refused, which ends the client's heartbeat, where the session has ended."""
        if session not in self._registry.sessions:
            raise Refused(f"session_id: {session[:80]!r} has ended", 410)
        self.touch(session)

    def idle(self) -> list[str]:
        """Returns the sessions whose clients have said nothing for service.session_timeout_s."""
        now_s = time.monotonic()
        idle = []
        for session in self._registry.sessions:
            seen_s = self._seen_s.setdefault(session, now_s)
            if now_s - seen_s > self._keys.session_timeout_s:
                idle.append(session)
        return idle

    def end(self, session: str) -> set[str]:
        """Ends a session; returns the models whose slots are free now."""
        models = set(self._registry.session(session))
        self._write(Ended(owner=session))
        self._seen_s.pop(session, None)
        return models

    # Models

    def create_model(self, asked: wire.CreateModel) -> str:
        self._registry.session(asked.session_id)
        self.touch(asked.session_id)
        self._check_base(asked.base_model)
        rank = self._checked_rank(asked.lora_config)
        id = f"{asked.session_id}:train:{asked.model_seq_id}"
        self._check_slots(id)
        seed = None if asked.lora_config is None else asked.lora_config.seed
        decided: dict[str, int | str] = {
            "base": asked.base_model,
            "rank": rank,
            "seed": secrets.randbits(62) if seed is None else seed,
        }
        body = wire.write_json(asked)
        return self._intake.accept(
            "create_model", f"{id}/0", asked.session_id, body, id, 0, decided
        )

    def _check_base(self, name: str) -> None:
        if name not in (self.base_name, self._config.model.path):
            raise Refused(
                f"base_model: {name[:120]!r} is not served; this server has {self.base_name!r}"
            )

    @property
    def base_name(self) -> str:
        return self._keys.model_name or Path(self._config.model.path).name

    @property
    def rank(self) -> int:
        """Returns the rank of the adapters; 0 where all weights are trained."""
        return self._subject.adapters.rank

    def _checked_rank(self, adapters: wire.Adapters | None) -> int:
        rank = 0 if adapters is None else adapters.rank
        shape = self._subject.adapters
        if rank != shape.rank:
            what = f"adapters of rank {shape.rank}" if shape.rank else "all weights: rank=0"
            raise Refused(f"lora_config.rank: {rank}; this server trains {what}")
        if not rank:
            return rank
        assert adapters is not None, "its rank is above 0"
        if adapters.train_unembed and self._keys.unembed == "refuse":
            raise Refused(
                "lora_config.train_unembed: true; this server has no adapters of the LM head: pass "
                "train_unembed=False, or serve with service.unembed=leave_out"
            )
        for key, wanted, layers in (
            ("train_attn", adapters.train_attn, _ATTENTION),
            ("train_mlp", adapters.train_mlp, _MLP),
        ):
            if wanted != any(shape.chooses(layer) for layer in layers):
                raise Refused(
                    f"lora_config.{key}: {str(wanted).lower()}; lora.targets of this server is "
                    f"{shape.targets}"
                )
        return rank

    def _check_slots(self, id: str) -> None:
        if id in self._registry.models:
            return
        taken = len([model for model in self._registry.models.values() if not model.is_unloaded])
        if taken >= self._keys.slots:
            raise Refused(
                f"create_model: all {self._keys.slots} slots are taken (service.slots); a client "
                "that closes its session frees its own",
                429,
            )

    def forward_backward(self, body: bytes) -> str:
        call = wire.read_forward_backward(body, self._keys.datums)
        model = self._known(call.model_id)
        loss, _ = loss_named(call.loss, call.config)
        check_datums(
            call.data,
            loss,
            vocab_size=self._subject.vocab_size,
            max_tokens=self._subject.max_tokens,
        )
        route = "forward" if call.forward_only else "forward_backward"
        if self._keys.strict and route == "forward_backward":
            check_provenance(self._registry, model, call)
        return self._intake.in_order(route, model, call.seq_id, body, {})

    def optim_step(self, asked: wire.OptimStep) -> str:
        model = self._known(asked.model_id)
        return self._intake.in_order(
            "optim_step", model, asked.seq_id, wire.write_json(asked), self._new_version()
        )

    def save_weights(self, asked: wire.SaveWeights) -> str:
        model = self._known(asked.model_id)
        name = asked.path or f"step-{asked.seq_id:06d}"
        path = f"{wire.PATH_PREFIX}{model.id}/weights/{_checked_name(name)}"
        if path in self._registry.weights and not asked.overwrite:
            previous = self._registry.futures.get(f"{model.id}/{asked.seq_id}")
            if previous is None:
                raise Refused(
                    f"path: {name!r} is there already; pass overwrite=True or another name"
                )
        return self._save("save_weights", model, asked, path, is_named=True)

    def save_for_sampler(self, asked: wire.SaveForSampler) -> str:
        model = self._known(asked.model_id)
        name = asked.path or f"snapshot-{asked.seq_id:06d}"
        path = f"{wire.PATH_PREFIX}{model.id}/sampler_weights/{_checked_name(name)}"
        return self._save(
            "save_weights_for_sampler", model, asked, path, is_named=asked.path is not None
        )

    def _save(
        self,
        route: str,
        model: Model,
        asked: wire.SaveWeights | wire.SaveForSampler,
        path: str,
        *,
        is_named: bool,
    ) -> str:
        body = wire.write_json(asked)
        known = self._intake.repeated(route, f"{model.id}/{asked.seq_id}", body)
        if known is not None:
            return known
        own = {
            saved.path
            for saved in self._registry.weights.values()
            if saved.is_named and saved.model == model.id
        }
        if is_named and len(own | {path}) > self._keys.saved:
            raise Refused(
                f"path: this model has {len(own)} saved weights (service.saved); overwrite one"
            )
        suffix = _file_name(f"{model.id}-{asked.seq_id}")
        decided: dict[str, int | str] = {
            "path": path,
            "file": str(self._directory / "weights" / f"{suffix}.safetensors"),
            "named": int(is_named),
            **self._new_version(),
        }
        if is_named and self._config.checkpoint.export_hf and route != "save_weights":
            decided["export"] = str(self._directory / "exports" / suffix)
        if asked.ttl_seconds is not None:
            if not 1 <= asked.ttl_seconds <= _SECONDS_IN_10_YEARS:
                raise Refused(f"ttl_seconds: {asked.ttl_seconds} must be from 1 to 10 years")
            decided["expires_s"] = str(time.time() + asked.ttl_seconds)
        if isinstance(asked, wire.SaveForSampler) and asked.sampling_session_seq_id is not None:
            decided["sampling_session"] = _sampling_id(model.owner, asked.sampling_session_seq_id)
        return self._intake.in_order(route, model, asked.seq_id, body, decided)

    def load_weights(self, asked: wire.LoadWeights) -> str:
        body = wire.write_json(asked)
        if asked.session_id is not None:
            return self._create_loaded(asked, body)
        if asked.model_id is None or asked.seq_id is None:
            raise Refused("load_weights: model_id and seq_id, or session_id and model_seq_id")
        model = self._known(asked.model_id)
        if (
            known := self._intake.repeated("load_weights", f"{model.id}/{asked.seq_id}", body)
        ) is not None:
            return known
        decided = self._loaded(asked)
        return self._intake.in_order("load_weights", model, asked.seq_id, body, decided)

    def _create_loaded(self, asked: wire.LoadWeights, body: bytes) -> str:
        assert asked.session_id is not None, "it was asked"
        if asked.model_seq_id is None or asked.model_id is not None:
            raise Refused("load_weights: with session_id give model_seq_id, and no model_id")
        self._registry.session(asked.session_id)
        self.touch(asked.session_id)
        if asked.base_model is not None:
            self._check_base(asked.base_model)
        id = f"{asked.session_id}:train:{asked.model_seq_id}"
        if (known := self._intake.repeated("create_loaded", f"{id}/0", body)) is not None:
            return known
        self._check_slots(id)
        decided = {
            **self._loaded(asked),
            "base": self.base_name,
            "rank": self._subject.adapters.rank,
            "seed": 0,
        }
        return self._intake.accept(
            "create_loaded", f"{id}/0", asked.session_id, body, id, 0, decided
        )

    def _loaded(self, asked: wire.LoadWeights) -> dict[str, int | str]:
        saved = self._registry.saved(asked.path, time.time())
        if asked.optimizer and not saved.has_optimizer:
            raise Refused(
                f"path: {asked.path[:120]!r} has no optimizer state; load its weights alone"
            )
        return {"file": saved.file, "optimizer": int(asked.optimizer), **self._new_version()}

    def unload(self, asked: wire.ModelRequest) -> str:
        model = self._known(asked.model_id)
        seq = max(model.futures, default=-1) + 1
        return self._intake.in_order("unload_model", model, seq, wire.write_json(asked), {})

    # Sampling

    def create_sampling_session(self, asked: wire.CreateSamplingSession) -> str:
        self._registry.session(asked.session_id)
        self.touch(asked.session_id)
        if asked.model_path is None and asked.base_model is None:
            raise Refused("create_sampling_session: give model_path, base_model or both")
        if asked.base_model is not None:
            self._check_base(asked.base_model)
        decided: dict[str, int | str] = {}
        if asked.model_path is not None:
            self._registry.saved(asked.model_path, time.time())
            decided["path"] = asked.model_path
        id = _sampling_id(asked.session_id, asked.sampling_session_seq_id)
        if (known := self._registry.sampling.get(id)) is not None:
            if known.path != asked.model_path:
                raise Refused(f"sampling_session_seq_id: {id} samples by other weights already")
            return id
        self._intake.accept("sampling_session", id, asked.session_id, b"", decided=decided)
        return id

    def sample(self, asked: wire.Sample) -> tuple[str, bool]:
        """Returns the request's id, and whether it is new."""
        sampling = self._registry.sampling.get(asked.sampling_session_id)
        if sampling is None:
            raise Refused(
                f"sampling_session_id: {asked.sampling_session_id[:80]!r} is none here; make a "
                "sampling client",
                404,
            )
        self.touch(sampling.owner)
        body = wire.write_json(asked)
        id = f"{sampling.id}/{asked.seq_id}"
        if (known := self._intake.repeated("sample", id, body)) is not None:
            return known, False
        length = len(asked.prompt.tokens)
        if not 1 <= length < self._subject.max_tokens:
            raise Refused(
                f"prompt: {length} tokens; this server takes 1 to {self._subject.max_tokens - 1:,}, "
                "which leaves room for a response"
            )
        if int(asked.prompt.tokens.max()) >= self._subject.vocab_size:
            raise Refused(f"prompt: token ids must be from 0 to {self._subject.vocab_size - 1}")
        if asked.prompt_logprobs_last_n is not None and not (
            asked.prompt_logprobs and asked.prompt_logprobs_last_n < length
        ):
            raise Refused(
                "prompt_logprobs_last_n: needs prompt_logprobs, and must be below the prompt's length"
            )
        if asked.num_samples > self._keys.samples:
            raise Refused(
                f"num_samples: {asked.num_samples} is above {self._keys.samples} (service.samples)"
            )
        seed = asked.sampling_params.seed
        decided: dict[str, int | str] = {
            "seed": secrets.randbits(60) if seed is None else seed,
        }
        if sampling.path is not None:
            saved = self._registry.saved(sampling.path, time.time())
            decided |= {
                "path_of": sampling.path,
                "of_model": saved.model,
                "of_version": saved.model_version,
            }
        self._intake.check_pending(sampling.owner)
        return self._intake.accept("sample", id, sampling.owner, body, decided=decided), True

    # What all requests share

    def _known(self, model: str) -> Model:
        found = self._registry.model(model)
        self.touch(found.owner)
        return found

    def _new_version(self) -> dict[str, int | str]:
        return {"version": self._registry.last_version + 1}


def _sampling_id(session: str, seq: int) -> str:
    return f"{session}:sample:{seq}"


def _checked_name(name: str) -> str:
    if not all(character.isalnum() or character in "-_." for character in name) or ".." in name:
        raise Refused(f"path: {name[:80]!r} may have letters, digits, '-', '_' and '.' alone")
    return name


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name)
