"""Build and load stand-ins for the CANN libraries that torch_npu links against, so that it imports without CANN.

acl_stub.c implements what creating tensors takes. Every other CANN symbol that torch_npu's
libraries leave undefined becomes a C function that returns an error, so a real use of the device
fails loudly. Needs gcc, nm and readelf.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

SOC = "Ascend910B2"
ERROR = 107002  # any aclError but 0
LIBRARIES = ("lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so")
CANN_SYMBOL = re.compile(
    r"(acl|rt[A-Z]|[Hh]ccl|[Hh]com|[Gg]e[A-Z]|GE|[Mm]sprof|[Pp]rof|tdt|_ZNK?2ge|_ZN3acl)"
)
CANN_LIBRARY = re.compile(
    r"NEEDED.*\[(lib(?:hccl|hcom|ascend|acl|ge_|graph|tdt|runtime|fmk|msprof|error)[^\]]*)\]"
)
MAIN_LIBRARY = "libascendcl.so"


def build(torch_npu: Path, directory: Path) -> None:
    """Write the stub libraries for the torch_npu package at `torch_npu` into `directory`; about a
    second.
    """
    symbols: set[str] = set()
    libraries: set[str] = set()
    for binary in [*torch_npu.glob("_C*.so"), *(torch_npu / name for name in LIBRARIES)]:
        if not binary.exists():
            continue
        for line in _output("nm", "-D", "--undefined-only", binary).splitlines():
            symbol = line.split()[-1]
            if "@" not in symbol and CANN_SYMBOL.match(symbol):
                symbols.add(symbol)
        libraries |= set(CANN_LIBRARY.findall(_output("readelf", "-d", binary)))

    source = Path(__file__).with_name("acl_stub.c")
    implemented = set(re.findall(r"\b(acl\w+)\(", source.read_text()))
    refusals = directory / "refusals.c"
    refusals.write_text(
        "".join(
            f'int refusal_{number}(void) __asm__("{symbol}");\nint refusal_{number}(void) {{ '
            f"return STUB_ERROR; }}\n"
            for number, symbol in enumerate(sorted(symbols - implemented))
        )
    )
    defines = (f"-DSTUB_ERROR={ERROR}", f'-DSTUB_SOC="{SOC}"')
    _link(directory, MAIN_LIBRARY, *defines, source, refusals)
    empty = directory / "empty.c"
    empty.write_text("")
    for library in sorted(libraries - {MAIN_LIBRARY}):
        # each pulls in the main one, so that the order of loading does not matter
        _link(
            directory,
            library,
            empty,
            "-Wl,--no-as-needed",
            f"-L{directory}",
            f"-l:{MAIN_LIBRARY}",
            "-Wl,-rpath,$ORIGIN",
        )


def load(directory: Path) -> None:
    """Load the stubs into this process; torch_npu's libraries then find them by their names.

    Before importing torch_npu.
    """
    for library in [directory / MAIN_LIBRARY, *sorted(directory.glob("lib*.so"))]:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _link(directory: Path, name: str, *arguments: object) -> None:
    _output(
        "gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", directory / name, *arguments
    )


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, timeout=60
    ).stdout
