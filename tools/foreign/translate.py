"""Configurations of TRL and verl as ours: every key of theirs is translated, without a counterpart that matters, or listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tools.foreign import trl, verl, verl_sft
from tools.foreign.common import make_whole
from tools.foreign.names import Origin
from tools.foreign.translation import NO_EXTENT, Extent, Imported, Translation

_TRANSLATORS: dict[str, tuple[Callable[[Translation], None], re.Pattern[str]]] = {
    "trl": (trl.from_trl, trl.NOT_NEEDED),
    "verl": (verl.from_verl, verl.NOT_NEEDED),
    "verl sft": (verl_sft.from_verl_sft, verl_sft.NOT_NEEDED),
}


def import_config(
    origin: Origin,
    parsed: Mapping[str, Any],
    unread: Mapping[str, str] | None = None,
    extent: Extent = NO_EXTENT,
) -> Imported:
    """Translates the settings of one file.

    Args:
        origin: whose file it is.
        parsed: the parsed file, nested or with dotted names.
        unread: names whose value could not be read, with the reason.
        extent: what the file leaves open.

    Raises:
        ConfigError: where a value is not what its name takes.
    """
    work = Translation(origin, parsed, unread, extent)
    kind = "verl sft" if origin == "verl" and verl_sft.is_sft(work) else origin
    translate, not_needed = _TRANSLATORS[kind]
    translate(work)
    work.list_left(not_needed)
    make_whole(work)
    work.check_values()
    return work.done
