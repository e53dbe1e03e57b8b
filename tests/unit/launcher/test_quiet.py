"""A sub-command's screen: what libraries write stays off it, what this program says stays on it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pa_npu.backends import registry
from pa_npu.checkpoints import directories
from pa_npu.errors import DataError
from pa_npu.launcher.cli import main
from pa_npu.launcher.quiet import quiet_libraries

NOISE = "NOISE"


def make_noise() -> None:
    """Writes in all the ways in which libraries do: warnings, bars, loggers, and from C."""
    warnings.warn(f"{NOISE}: deprecated", stacklevel=1)
    print(f"{NOISE}: 100%|####|", file=sys.stderr)
    print(f"{NOISE}: loading")
    logging.getLogger("transformers").warning("%s of a library", NOISE)
    os.write(2, f"{NOISE} from C\n".encode())
    os.system(f"echo {NOISE} of a child")


def test_what_libraries_write_stays_off_the_screen_and_our_own_lines_on_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_noise()
    written = capfd.readouterr()
    assert (written.out + written.err).count(NOISE) >= 4, "the control: it is on the screen"
    with quiet_libraries():
        make_noise()
        logging.getLogger("pa_npu.backends").warning("a file was left out")
    print("done")
    written = capfd.readouterr()
    assert (written.out, written.err) == ("done\n", "a file was left out\n")


@pytest.mark.parametrize(
    ("failure", "is_explained"),
    [(DataError("no such layer"), False), (RuntimeError("index out of range"), True)],
)
def test_only_a_failure_that_nobody_foresaw_shows_what_libraries_wrote(
    failure: Exception, is_explained: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(failure)), quiet_libraries():
        make_noise()
        raise failure
    os.write(2, b"the screen is back\n")
    written = capfd.readouterr().err
    assert (f"{NOISE} from C" in written) == is_explained
    assert written.endswith("the screen is back\n")


def test_an_export_says_what_it_writes_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "iteration_000001"
    output = tmp_path / "hf"
    checkpoint.mkdir()

    def export(directory: Path, target: Path, model: str | None, merged: bool) -> None:
        make_noise()
        target.mkdir()
        (target / "model.safetensors").write_bytes(bytes(2_000_000))

    noisy: Callable[[str], SimpleNamespace] = lambda _: SimpleNamespace(export_checkpoint=export)  # noqa: E731
    monkeypatch.setattr(registry, "backend_module", noisy)
    for module in (registry, directories):
        monkeypatch.setattr(module, "read_meta", lambda _: SimpleNamespace(config={}))
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(output)]) == 0
    written = capfd.readouterr()
    assert written.out == f"wrote {output}: 1 file, 1.9 MiB\n"
    assert written.err == f"exporting {checkpoint}\n"
