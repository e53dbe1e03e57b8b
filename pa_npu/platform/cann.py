"""The release of CANN, Ascend's toolkit, that this process's environment names."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # what CANN's set_env.sh sets
_MOST_FILES = 8


def cann_version() -> str | None:
    """The toolkit's release, such as 9.1.0, from its own record; None where there is none."""
    home = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    for file in sorted(Path(home).glob("**/*install.info"))[:_MOST_FILES] if home else ():
        match = re.search(r"^version=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match:
            return match[1]
    return None
