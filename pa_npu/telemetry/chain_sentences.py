"""Says in sentences how two chains compare: `pa-npu diff` and `verify` print them, and the viewer's page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.telemetry.chain_comparison import Comparison, Difference


def compared_iterations(comparison: Comparison) -> str:
    last = comparison.begin + comparison.iterations - 1
    if comparison.iterations > 1:
        return f"iterations {comparison.begin} to {last}"
    return f"iteration {last}"


def sentences(comparison: Comparison) -> list[str]:
    """Why bits may differ, and what differs first.

    Runs that differ by rounding alone are not called equal here: their weights decide that, which
    only their checkpoints have.
    """
    lines = [f"bits may differ: {cause}" for cause in comparison.causes]
    verdict = comparison.verdict
    differences = comparison.differences
    last = comparison.last
    if verdict == "equal":
        return [
            *lines,
            "equal to the bit: data, responses, log-probs, rewards, gradients and weights",
        ]
    if verdict == "rounding":
        return lines + _since("the first bits differ", differences)
    if differences[0].iteration < last[0].iteration:
        lines += _since("the first bits differ, within rounding,", differences)
    if verdict == "undecided":
        return [*lines, *_since("they part", last), "what follows cannot be compared"]
    return lines + _since("they differ", last)


def _since(words: str, differences: Sequence[Difference]) -> list[str]:
    cause, *effects = differences
    lines = [f"{words} in iteration {cause.iteration}, first in the {cause.aspect}: {cause.text}"]
    if effects:
        lines.append(f"and therefore in: {', '.join(effect.aspect for effect in effects)}")
    return lines
