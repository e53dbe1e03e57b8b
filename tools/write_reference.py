"""Write docs/configuration.md, the reference of all configuration keys, from the schema.

python tools/write_reference.py [--check]      --check writes nothing and ends with 1 where the file is not current
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from pa_npu.config.keys import ENTRIES, Key, all_keys, entry_of, preset_lines, section_of, show
from pa_npu.config.presets import PRESETS
from pa_npu.config.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

<!-- Written by `python tools/write_reference.py` from pa_npu/config/sections. -->

Keys are written in YAML files, one section per heading, and as `section.key=value` on the command line; later files win over
earlier ones, and the command line over files. `pa-npu plan --full --config FILE [key=value ...]` prints the whole resolved tree. An
unknown key is an error that names the nearest one. Names of TRL and verl are on [a page of their own](names.md).

On the command line a text is taken as it is, `#`, `&`, `*` and spaces included: `'data.instruction=Put the answer after ####'`.
`null` is no value, for keys that may have none. A text that stands in quotes of its own may hold YAML's escapes:
`'data.instruction="line one\\nline two"'`. Other values are YAML: `3`, `true`, `[a, b]`. In YAML files texts follow YAML's rules,
so one with ` #` or with a `:` followed by a space needs quotes there. Paths may begin with `~` or `~user`.

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


def keys_markdown() -> str:
    """Returns every key as markdown, a table per section."""
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        model = section_of(field.annotation)
        prefix = f"{section}."
        if (named := entry_of(field.annotation)) is not None:
            model = named
            prefix = f"{section}.NAME."
        if model is None:
            continue
        lines += [
            "",
            f"## {section}",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in all_keys(model, prefix):
            lines.append(_row(key))
            if entry := ENTRIES.get(key.name):
                lines += [
                    _row(replace(inner, name=f"{key.name}[].{inner.name}"))
                    for inner in all_keys(entry)
                ]
        if section == "algorithm":
            lines += [
                "",
                "Presets, `algorithm.name`, and the keys that they fill where you do not:",
                "",
            ]
            for name in PRESETS:
                source, values = (line.strip() for line in preset_lines(name))
                lines.append(f"- `{source.partition(':')[0]}`{source[len(name) :]}: `{values}`")
    return "\n".join(lines[1:])


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{show(key.default)}`"
    cells = (f"`{key.name}`", key.type, default, key.description)
    return (
        "| "
        + " | ".join(
            cell.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") for cell in cells
        )
        + " |"
    )


if __name__ == "__main__":
    sys.exit(main())
