"""Where a checkpoint comes from, its configuration and model, and which of the two may be others when it is continued."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError

# Enough of a weight file's ends to tell two models apart without reading all of it.
_SAMPLE_BYTES = 2**20

# Other values than the checkpoint's: refused, because it could not be loaded or would mean something else.
REFUSED = {
    "run.seed": "the data order and every sampling seed depend on it",
    "model.dtype": "the weights are saved in it",
    "trainer.distributed_optimizer": "the optimizer's state is saved in its form",
}
# Of no consequence for what is computed; not worth a word.
_SILENT = ("run.dir", "run.device", "checkpoint.", "telemetry.", "placement.")
# A run continues in its own directory with other values of these and stays the same run.
_SAME_RUN = (
    *_SILENT,
    "model.path",
    "model.head_chunk_tokens",
    "data.test",
    *(f"reward.{key}" for key in ("timeout_s", "workers", "max_failing_share")),
    *(
        f"rollout.{key}"
        for key in ("engines", "attach", "key_file", "tensor_parallel", "python", "window", "env", "extra_args")
    ),
    *(f"rollout.{key}" for key in ("max_num_", "memory_fraction", "kv_cache_gib")),
    *(f"rollout.{key}" for key in ("graph_mode", "prefix_caching", "expandable_segments")),
    *(f"rollout.{key}" for key in ("request_timeout_s", "startup_timeout_s")),
    "trainer.",
    "microbatch.",
    "attention.",
    "publish.",
    *(f"schedule.{key}" for key in ("iterations", "evaluate_every")),
)


def config_tree(config: Config) -> dict[str, Any]:
    """The resolved configuration as JSON values."""
    return config.model_dump(mode="json")


def config_digest(config: Config) -> str:
    """Changes with any value of the resolved configuration."""
    text = json.dumps(config_tree(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def model_fingerprint(path: str | Path) -> str:
    """Changes with the HF model's config.json, and with the size, beginning or end of a weight file."""
    digest = hashlib.blake2b(digest_size=8)
    for file in (Path(path) / "config.json", *sorted(Path(path).glob("*.safetensors"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys, as section.key, whose values differ between two resolved configurations."""
    first, second = _flat(one), _flat(other)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def changes_the_run(keys: list[str]) -> list[str]:
    """Those of `keys` that would make a continued run another one."""
    return [key for key in keys if not key.startswith(_SAME_RUN) or key in REFUSED]


def check_continuation(saved: dict[str, Any], config: Config, what: str) -> str | None:
    """Raises ConfigError when a checkpoint of the configuration `saved` cannot be continued with `config`.

    Returns a line that names the other keys with new values, if any. `what` names the checkpoint.
    """
    before = _flat(saved)
    changed = [key for key in differences(saved, config_tree(config)) if not key.startswith(_SILENT)]
    for key in changed:
        if key in REFUSED:
            raise ConfigError(
                f"{key}: {what} was written with {_shown(before.get(key))}, and {REFUSED[key]}; restore the value, or start "
                f"from an HF export of the checkpoint (launcher export) as model.path"
            )
    if not changed:
        return None
    return f"{what} was written with " + ", ".join(f"{key}={_shown(before.get(key))}" for key in changed)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
