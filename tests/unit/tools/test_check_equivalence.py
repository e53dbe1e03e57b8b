"""The verdicts of tools/check_equivalence.py over weights that its runs might have ended with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools import check_equivalence
from tools.check_equivalence import REFERENCE, VARIANTS, Variant

PERIODIC, COMPLETION, *_, CONTROL = VARIANTS
BOUND = check_equivalence.COMPLETION_BOUND


@pytest.mark.parametrize(
    ("variant", "change", "code", "message"),
    [
        (PERIODIC, 0.0, 0, "bit-identical"),
        (PERIODIC, 1e-7, 1, "FAILED: must be bit-identical"),
        (COMPLETION, BOUND / 2, 0, "below 1e-05"),
        (COMPLETION, BOUND * 2, 1, "FAILED: must be below 1e-05"),
        (CONTROL, BOUND * 2, 0, "differs, as it must"),
        (CONTROL, 0.0, 1, "FAILED: the control does not differ, so equality shows nothing"),
    ],
)
def test_a_difference_beyond_a_variants_bound_ends_the_tool_with_1(
    variant: Variant,
    change: float,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    changed = {variant.name: change, REFERENCE.name: 0.0}

    def run(args: object, asked: Variant) -> dict[str, torch.Tensor]:
        return {"same": torch.ones(3), "trained": torch.ones(3) + changed[asked.name]}

    monkeypatch.setattr(check_equivalence, "run", run)
    assert check_equivalence.main(["--work", str(tmp_path)], [variant]) == code
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(variant.name)
    ]
    assert line.endswith(message)


def test_exports_with_other_tensors_are_no_difference_but_an_error() -> None:
    with pytest.raises(SystemExit, match=r"different tensors: \['b'\]"):
        check_equivalence.compare({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
