"""Translates a configuration file of TRL or verl into one of ours, and lists what could not be translated.

python tools/import_config.py --from verl run_qwen3_8b.sh --output ours.yaml
python tools/import_config.py --from trl train.py --devices 8 --output ours.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.keys import all_keys
from pa_npu.config.load import validated
from pa_npu.config.yaml_source import dump_yaml, read_text, read_yaml
from pa_npu.errors import BAD_INPUT, ConfigError, UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.foreign.names import Origin
from tools.foreign.program import read_program
from tools.foreign.script import Arguments, read_script
from tools.foreign.systems import other_system, refusal
from tools.foreign.translate import import_config
from tools.foreign.translation import Extent, Imported

_KINDS = (
    "a script that starts training (.sh), a program of TRL (.py), or YAML: GRPOConfig's "
    "fields, ppo_trainer.yaml's tree"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="origin", required=True, choices=("trl", "verl"), help="whose file it is"
    )
    parser.add_argument("file", metavar="FILE", help=_KINDS)
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        help="devices of the run, where the file does not say",
    )
    parser.add_argument(
        "--rows",
        type=_count,
        metavar="N",
        help="rows of the training data, if the files are not here",
    )
    parser.add_argument("--output", metavar="YAML", help="file to write; default: print it")
    try:
        _translate(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _translate(options: argparse.Namespace) -> None:
    origin: Origin = options.origin
    source = _read(options.file, origin)
    try:
        imported = import_config(
            origin, source.values, source.unread, Extent(options.devices, options.rows)
        )
    except ConfigError as error:
        raise UserError(f"{options.file}: {error}") from None
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise UserError(
            f"{options.file}: a value of it is not what {origin} has there ({error}); is it a file "
            f"of {origin}?"
        ) from None
    if not imported.read_any:
        raise UserError(f"{options.file}: no key of {origin} is in it; give a file of {origin}")
    text = f"# From {Path(options.file).name}, of {origin}.\n{dump_yaml(imported.tree())}"
    if options.output is None:
        print(text, end="")
    else:
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--output: {options.output} cannot be written ({error.strerror}); name another "
                "file"
            ) from None
    for line in remarks(imported):
        print(line, file=sys.stderr)


def _read(file: str, origin: Origin) -> Arguments:
    """Reads the settings of a file; its ending tells its kind.

    Raises UserError for one of another system, by its name.
    """
    if not Path(file).exists():
        raise UserError(f"{file}: no such file; give {_KINDS}")
    text = read_text(file)
    if (system := other_system(text, origin)) is not None:
        raise UserError(f"{file}: {refusal(system)}")
    ending = Path(file).suffix
    if ending in (".sh", ".bash"):
        return read_script(text, origin, file)
    if ending == ".toml":
        raise UserError(f"{file}: neither TRL nor verl is configured by TOML; give {_KINDS}")
    if ending != ".py":
        return Arguments(read_yaml(file)[0])
    if origin == "verl":
        raise UserError(
            f"{file}: verl is configured by a shell script or by YAML; give that, or --from trl "
            "for a program of TRL"
        )
    return read_program(text, file)


def remarks(imported: Imported) -> list[str]:
    """Says which keys were lost or say something else here, which a run needs besides, and which
    rule the whole breaks.
    """
    lines = [f"not translated: {name} = {why}" for name, why in imported.untranslated.items()]
    lines += [f"changed: {key} = {why}" for key, why in imported.adapted.items()]
    needed = [
        key.name
        for key in all_keys()
        if key.required and ".NAME." not in key.name and key.name not in imported.values
    ]
    lines += [f"still needed: {name}" for name in needed]
    tree = imported.tree()
    for name in needed:
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = "?"
    try:
        validated(tree, {})
    except ConfigError as error:
        lines.append(f"still to settle: {error}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
