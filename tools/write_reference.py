"""Write docs/configuration.md, the reference of all configuration keys, from the schema.

python tools/write_reference.py [--check]      --check writes nothing and ends with 1 where the file is not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pa_npu.config.help import keys_markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

<!-- Written by `python tools/write_reference.py` from pa_npu/config/sections. -->

Keys are written in YAML files, one section per heading, and as `section.key=value` on the command line; later files win over
earlier ones, and the command line over files. `pa-npu plan --full --config FILE [key=value ...]` prints the whole resolved tree. An
unknown key is an error that names the nearest one, also for names of TRL and verl ([coming from there](names.md)).

"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args(arguments)
    text = _HEAD + keys_markdown() + "\n"
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
