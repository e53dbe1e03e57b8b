"""An evaluation's numbers in the layout of lm-eval's results_*.json, for tools that read and compare those.

    {"results": {SET: {"alias": SET, "exact_match,none": x, "exact_match_stderr,none": s, ...}},
     "versions", "n-shot", "higher_is_better", "n-samples", "config", ...}

`exact_match` is the share of questions whose greedy answer is right; avg@n, pass@k and maj@k stand
beside it under their own names. Standard errors are those of lm-eval: the sample's deviation over
questions, divided by the root of their number.

Source: `lm_eval.loggers.EvaluationTracker` and `lm_eval.utils.make_table` of lm-eval 0.4.13.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.evaluation.results import GREEDY, Judged, set_values

_NAMES = {GREEDY: "exact_match"}
_FILTER = "none"  # lm-eval's name of a metric without a filter


def harness_results(responses: Sequence[Judged], config: Config) -> dict[str, Any]:
    """Returns the numbers of all sets in lm-eval's layout."""
    results: dict[str, Any] = {}
    higher: dict[str, dict[str, bool]] = {}
    samples: dict[str, dict[str, int]] = {}
    for name, metrics in set_values(responses).items():
        row: dict[str, Any] = {"alias": name}
        for metric, values in metrics.items():
            called = _NAMES.get(metric, metric)
            row[f"{called},{_FILTER}"] = statistics.fmean(values.values())
            row[f"{called}_stderr,{_FILTER}"] = _standard_error(values)
        results[name] = row
        higher[name] = {_NAMES.get(metric, metric): True for metric in metrics}
        num_questions = len({r.question for r in responses if r.name == name})
        samples[name] = {"original": num_questions, "effective": num_questions}
    evaluate = config.evaluate
    return {
        "results": results,
        "group_subtasks": {name: [] for name in results},
        "configs": {name: {"task": name, "output_type": "generate_until"} for name in results},
        "versions": {name: 0 for name in results},
        "n-shot": {name: 0 for name in results},
        "higher_is_better": higher,
        "n-samples": samples,
        "config": {
            "model": "pa_npu",
            "model_args": {"pretrained": config.model.path, "dtype": config.model.dtype},
            "gen_kwargs": {
                "samples": evaluate.samples,
                "temperature": evaluate.temperature,
                "top_p": evaluate.top_p,
                "max_gen_toks": evaluate.max_response_tokens or config.rollout.max_response_tokens,
            },
        },
        "model_source": "pa_npu",
        "model_name": config.model.path,
    }


def write_harness_results(file: Path, responses: Sequence[Judged], config: Config) -> None:
    """Writes the numbers beside the results by question. Raises OSError."""
    text = json.dumps(harness_results(responses, config), indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def _standard_error(values: Mapping[int, float]) -> float | str:
    if len(values) < 2:
        return "N/A"  # as lm-eval writes it
    return statistics.stdev(values.values()) / len(values) ** 0.5
