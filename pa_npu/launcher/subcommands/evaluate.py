"""`pa-npu evaluate`: a model or checkpoint on named sets of questions, without training; results per question in a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.launcher.subcommands import configuration

# What stands for a key here.
_OWN_NAMES = {
    "checkpoint.load": "--checkpoint",
    "data.train": "--data",
    "evaluate.sets.": "--data ",
    "evaluate.sets": "--data",
    "model.path": "--model",
    "run.dir": "--output",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    configuration.add_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="HF", help="HF model directory")
    source.add_argument("--checkpoint", metavar="DIR", help="a directory .../iteration_NNNNNN; it is exported for this")
    source.add_argument(
        "--results", metavar="FILE", help="results of an evaluation that was made; nothing is asked anew"
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=FILE", help="a set of questions; repeatable"
    )
    parser.add_argument("--output", default="runs/evaluate", metavar="DIR", help="where results and logs go")
    parser.add_argument("--compare", metavar="FILE", help="results of another evaluation to compare with, by question")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.results:
        from pa_npu.launcher.evaluation import show

        if unread := [*options.data, *options.overrides, *rest]:
            raise UserError(
                f"command line: {unread[0]}: --results asks nothing, so that this would be read by nothing; remove it"
            )
        return show(options.results, options.compare)
    config = _config(options, rest)
    from pa_npu.launcher.evaluation import evaluate

    with configuration.called(_OWN_NAMES):
        return evaluate(config, options.checkpoint, options.compare)


def _config(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    given = configuration.overrides(options, rest)
    if not options.data:
        raise UserError("command line: --data NAME=FILE is needed, as in --data gsm8k=data/gsm8k/test.jsonl")
    sets: list[tuple[str, str]] = []
    for text in options.data:
        name, separator, file = text.partition("=")
        if not separator or not name or not file:
            raise UserError(f"command line: --data {text}: is not NAME=FILE, as in gsm8k=data/gsm8k/test.jsonl")
        if name in (other for other, _ in sets):
            raise UserError(f"command line: --data {text}: a set is called {name} already; give each a name of its own")
        sets.append((name, file))
    given += [f"run.dir={options.output}", f"data.train={sets[0][1]}"]  # a configuration needs one; it is not read
    given += [f"evaluate.sets.{name}={file}" for name, file in sets]
    given += [f"model.path={options.model or f'{options.output}/model'}"]
    with configuration.called(_OWN_NAMES):
        return load_config(options.config, given)
