"""Translates a configuration file of TRL or verl into one of ours, and lists what could not be translated.

python tools/import_config.py --from verl run_qwen3_8b.sh --output ours.yaml
python tools/import_config.py --from trl train.py --output ours.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pa_npu.config.keys import all_keys
from pa_npu.config.yaml_source import dump_yaml, read_text, read_yaml
from pa_npu.errors import BAD_INPUT, UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.foreign.names import Origin
from tools.foreign.program import read_program
from tools.foreign.script import Arguments, read_script
from tools.foreign.translate import Imported, import_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="origin", required=True, choices=("trl", "verl"), help="whose file it is")
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a script that starts training (.sh), a program of TRL (.py), or YAML: GRPOConfig's fields, ppo_trainer.yaml's tree",
    )
    parser.add_argument("--output", metavar="YAML", help="file to write; default: print it")
    try:
        _translate(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _translate(options: argparse.Namespace) -> None:
    given = _read(options.file, options.origin)
    try:
        imported = import_config(options.origin, given.values, given.unread)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{options.file}: a value of it is not what {options.origin} has there ({error}); is it a file of {options.origin}?"
        ) from None
    text = f"# From {Path(options.file).name}, of {options.origin}.\n{dump_yaml(imported.tree())}"
    if options.output is None:
        print(text, end="")
    else:
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--output: {options.output} cannot be written ({error.strerror}); name another file"
            ) from None
    for line in remarks(imported):
        print(line, file=sys.stderr)


def _read(file: str, origin: Origin) -> Arguments:
    """Reads the settings of a file; its ending tells its kind."""
    ending = Path(file).suffix
    if ending in (".sh", ".bash"):
        return read_script(read_text(file), origin, file)
    if ending != ".py":
        return Arguments(read_yaml(file)[0])
    if origin == "verl":
        raise UserError(
            f"{file}: verl is configured by a shell script or by YAML; give that, or --from trl for a program of TRL"
        )
    return read_program(read_text(file), file)


def remarks(imported: Imported) -> list[str]:
    """Says which keys were lost, and which a run needs besides."""
    lines = [f"not translated: {name} = {why}" for name, why in imported.untranslated.items()]
    needed = [key.name for key in all_keys() if key.required and key.name not in imported.values]
    return [*lines, *(f"still needed: {name}" for name in needed)]


if __name__ == "__main__":
    sys.exit(main())
