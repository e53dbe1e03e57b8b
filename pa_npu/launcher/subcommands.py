"""The sub-commands of `pa-npu` that are a few lines each, and the options that name a configuration.

A sub-command is two functions: NAME_options adds its arguments to a parser that has name and
description already, NAME does it and returns the exit code. `rest` is what the parser did not know,
which must be refused or used. What a sub-command needs is imported when it is called: help and
mistakes need not wait for torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pa_npu.algorithm.rules import load_config
from pa_npu.config.keys import find_annotation, keys_help, sections_help
from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.errors import UserError, plain
from pa_npu.launcher.arguments import existing_path, new_path
from pa_npu.planning import automatic
from pa_npu.telemetry.report import WARMUP_ITERATIONS

_MAX_MEMORY_GIB = 1_000_000
# What stands for a key in `evaluate`.
_OWN_NAMES = {
    "checkpoint.load": "--checkpoint",
    "data.train": "--data",
    "evaluate.sets.": "--data ",
    "evaluate.sets": "--data",
    "model.path": "--model",
    "run.dir": "--output",
}


def run_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "pa-npu run --config YAML [--config YAML ...] [--device KIND] [--on-interrupt stop|finish] "
        "[--dry-run [--full] [--device-memory-gib GIB]] [key=value ...]"
    )
    parser.epilog = (
        "sections of the configuration (in YAML files, or as section.key=value on the command "
        "line):\n\n"
        f"{sections_help()}\n\n`pa-npu run --help SECTION` has the keys of a section, `--help "
        "KEY` one key, `--help all` all of them; docs/configuration.md too"
    )
    parser.add_argument("--dry-run", action="store_true", help="what `pa-npu plan` does")
    parser.add_argument(
        "--on-interrupt",
        choices=("stop", "finish"),
        default="stop",
        help="on the first SIGINT (Ctrl-C): stop at once, or finish the iteration and leave a "
        "checkpoint and an export",
    )
    plan_options(parser)


def run_help(section: str) -> str | None:
    """Returns what `run --help SECTION` prints: the keys of all sections, of one, or one key; None
    if there is no such section or key.
    """
    if section == "all":
        return keys_help()
    return keys_help(section) if find_annotation(tuple(section.split("."))) is not None else None


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs a configuration, or with --dry-run only plans it."""
    from pa_npu.launcher.run_directory import check_run_directory, done_line, resolve_resume

    if options.dry_run:
        return plan(options, rest)
    asked = read(options, rest)
    for option, given_there in (
        ("--device-memory-gib", options.device_memory_gib is not None),
        ("--full", options.full),
    ):
        if given_there:
            raise UserError(f"command line: {option} is for planning; add --dry-run, or remove it")
    lines: list[str] = []
    config = resolve_resume(asked, lines.append)
    check_run_directory(config)  # first: a run that is refused continues from nothing
    if done := done_line(config):
        print(done)
        return 0
    for line in lines:
        print(line, file=sys.stderr)
    print("checking model, data, rewards and devices", flush=True)
    from pa_npu.launcher import run as launcher

    return launcher.run(config, ends_early=options.on_interrupt == "finish")


def plan_options(parser: argparse.ArgumentParser) -> None:
    configuration_options(parser)
    parser.add_argument(
        "--full", action="store_true", help="print the resolved configuration as well"
    )
    parser.add_argument(
        "--device-memory-gib", metavar="GIB", help="memory of a device to plan with"
    )


def plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints what follows from a configuration. With --full the resolved configuration is printed
    too, as YAML in which the other lines are comments.

    What this machine merely lacks becomes a note, so that a cluster's run can be planned.
    """
    from pa_npu.launcher.placement import placement_lines
    from pa_npu.launcher.run_checks import prepare
    from pa_npu.planning.comparison import compare, comparison_lines
    from pa_npu.planning.plan_text import derived_lines

    asked = read(options, rest)
    memory_gib = checked_memory_gib(options.device_memory_gib)
    config, findings = prepare(
        asked, lambda line: print(line, file=sys.stderr), forgive=True, device_memory_gib=memory_gib
    )
    placement = placement_lines(findings.placements) if findings.placements else []
    compared = compare(config, findings.spec) if findings.spec is not None else None
    lines = [
        *derived_lines(config, findings.spec, findings.device_bytes, findings.own_memory),
        *(comparison_lines(compared) if compared is not None else ()),
        *findings.counts,
        *placement,
    ]
    lines += [f"note: {note}" for note in findings.notes]
    if not sys.stdout.isatty():
        lines = [plain(line) for line in lines]
    print("\n".join(f"# {line}" if options.full else line for line in lines))
    print(
        dump_config(config)
        if options.full
        else "The resolved configuration: the same command with --full."
    )
    return 0


def doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """This machine, its installation, and with a configuration whether that one could run here."""
    from pa_npu.launcher.doctor import doctor as examine

    is_given = options.config or options.overrides or rest
    return examine(read(options, rest) if is_given else None, options.device)


def engines(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Engines that outlive runs, which attach to them with rollout.attach."""
    config = read(options, rest)
    from pa_npu.launcher.run import run_engines

    return run_engines(config)


def evaluate_options(parser: argparse.ArgumentParser) -> None:
    configuration_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="HF", help="HF model directory")
    source.add_argument(
        "--checkpoint",
        type=existing_path,
        metavar="DIR",
        help="a directory .../iteration_NNNNNN; it is exported for this",
    )
    source.add_argument(
        "--results",
        type=existing_path,
        metavar="FILE",
        help="results of an evaluation that was made; nothing is asked anew",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a set of questions; repeatable",
    )
    parser.add_argument(
        "--output", default="runs/evaluate", metavar="DIR", help="where results and logs go"
    )
    parser.add_argument(
        "--compare",
        type=existing_path,
        metavar="FILE",
        help="results of another evaluation to compare with, by question",
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="write the answers there too, as rows that another model learns from "
        "(the supervised stage)",
    )
    parser.add_argument(
        "--only-correct", action="store_true", help="of the answers, write the correct ones alone"
    )


def evaluate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Ask the questions of all sets, or show and compare results that are there."""
    if options.results:
        from pa_npu.launcher.evaluation import show

        rows = [option for option in (options.rows,) if option]
        if unread := [*options.data, *rows, *options.overrides, *rest]:
            raise UserError(
                f"command line: {unread[0]}: --results asks nothing, so that this would be read by "
                "nothing; remove it"
            )
        return show(options.results, options.compare)
    if options.only_correct and not options.rows:
        raise UserError(
            "command line: --only-correct is about the rows that are written; add --rows FILE"
        )
    with _called(_OWN_NAMES):
        config = _evaluated(options, rest)
        from pa_npu.launcher import evaluation

        return evaluation.evaluate(
            config,
            options.checkpoint,
            options.compare,
            options.rows,
            only_correct=options.only_correct,
        )


def _evaluated(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    overrides = configured_overrides(options, rest)
    if not options.data:
        raise UserError(
            "command line: --data NAME=FILE is needed, as in --data gsm8k=data/gsm8k/test.jsonl"
        )
    sets: list[tuple[str, str]] = []
    for text in options.data:
        name, separator, file = text.partition("=")
        if not separator or not name or not file:
            raise UserError(
                f"command line: --data {text}: is not NAME=FILE, as in gsm8k=data/gsm8k/test.jsonl"
            )
        if name in (name_before for name_before, _ in sets):
            raise UserError(
                f"command line: --data {text}: a set is called {name} already; give each a name of "
                "its own"
            )
        sets.append((name, file))
    values: dict[tuple[str, ...], str] = {
        ("run", "dir"): options.output,
        ("data", "train"): sets[0][1],  # a configuration needs one; it is not read
        ("model", "path"): options.model or f"{options.output}/model",
        **{("evaluate", "sets", name): file for name, file in sets},
    }
    return load_config(options.config, overrides, values)


def export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=existing_path,
        metavar="DIR",
        help="a directory .../iteration_NNNNNN",
    )
    parser.add_argument(
        "--output", required=True, type=new_path, metavar="DIR", help="the HF directory to write"
    )
    parser.add_argument(
        "--model",
        type=existing_path,
        metavar="DIR",
        help="the HF model that the run began with, if it has moved",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="merge adapters (LoRA) into the model, as export_hf=merged",
    )


def export(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Writes the policy of a checkpoint as an HF directory, in one process without a device."""
    refuse(rest)
    from pa_npu.checkpoints.directories import read_meta
    from pa_npu.launcher.quiet import quiet_libraries
    from pa_npu.planning.memory import format_bytes

    checkpoint = Path(options.checkpoint)
    output = Path(options.output)
    with _called({"checkpoint.load": "--checkpoint", "model.path": "--model"}):
        read_meta(checkpoint)  # before anything is said: loading libraries takes seconds
        print(f"exporting {options.checkpoint}", file=sys.stderr, flush=True)
        with quiet_libraries():
            from pa_npu.backends.registry import export_checkpoint

            export_checkpoint(checkpoint, output, options.model, options.merged)
    sizes = [file.stat().st_size for file in output.iterdir() if file.is_file()]
    print(f"wrote {options.output}: {counted(len(sizes), 'file')}, {format_bytes(sum(sizes))}")
    return 0


def report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=existing_path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--warmup",
        type=_count,
        default=WARMUP_ITERATIONS,
        metavar="N",
        help="iterations to leave out at the beginning (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the throughput (TPSPD) of finished or running runs side by side, compared with the
    first of them.
    """
    refuse(rest)
    from pa_npu.telemetry import report as reports

    columns = reports.each_run([reports.load_report(run, options.warmup) for run in options.runs])
    if options.json:
        print(json.dumps(reports.as_json(columns), indent=2))
    else:
        print(reports.render_text(columns))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no count; give a number from 0 on")
    return int(text)


def configuration_options(parser: argparse.ArgumentParser) -> None:
    """The options that name a configuration, the same for every sub-command that reads one: files,
    device, overrides.
    """
    parser.add_argument(
        "--config",
        type=existing_path,
        action="append",
        default=[],
        metavar="YAML",
        help="configuration file; later ones win",
    )
    parser.add_argument(
        "--device", choices=("auto", "npu", "cuda", "cpu"), help="short for run.device=KIND"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override of a configuration key"
    )


doctor_options = engines_options = configuration_options


def read(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    """Returns the configuration that the command line names."""
    return automatic.load(
        options.config,
        configured_overrides(options, rest),
        lambda line: print(line, file=sys.stderr),
    )


def configured_overrides(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """They may stand before, between and after the options; argparse leaves the later ones in
    `rest`.
    """
    for argument in rest:
        if argument.startswith("-"):
            raise UserError(f"command line: {argument}: unknown option; {_remedy(argument)}")
    return [
        *options.overrides,
        *rest,
        *([f"run.device={options.device}"] if options.device else []),
    ]


def _remedy(option: str) -> str:
    """Returns what to write in place of an unknown option, which may be a key with dashes."""
    name, equals, value = option.lstrip("-").partition("=")
    if find_annotation(tuple(name.split("."))) is None:
        return "see --help"
    return f"a key has no dashes: {name}={value if equals else 'VALUE'}"


@contextmanager
def _called(names: Mapping[str, str]) -> Iterator[None]:
    """Keys at the beginning of a refusal by what the sub-command calls them. names: of options by
    key.
    """
    try:
        yield
    except UserError as error:
        for key, option in names.items():
            if match := re.match(rf"(command line: )?{re.escape(key)}", str(error)):
                raise type(error)(f"{match[1] or ''}{option}{str(error)[match.end() :]}") from None
        raise


def refuse(rest: Sequence[str]) -> None:
    """Refuses arguments that are left; for sub-commands without a configuration."""
    if rest:
        raise UserError(f"command line: {rest[0]}: unknown argument; see --help")


def checked_memory_gib(text: str | None) -> float | None:
    """Returns the size that --device-memory-gib names. Raises UserError where it is none."""
    if text is None:
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= _MAX_MEMORY_GIB:  # NaN is neither
        raise UserError(
            f"command line: --device-memory-gib {text[:40]!r} is no size of a memory; give a "
            f"number above 0 and up to {_MAX_MEMORY_GIB}"
        )
    return size
