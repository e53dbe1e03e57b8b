"""A stand-in for the library wandb that writes what it is told into a file, and misbehaves as FAKE_WANDB says.

FAKE_WANDB: comma-separated kind:iteration, of raise and hang, which lasts until FAKE_WANDB_FILE.go
is there; no_key, hang_at_finish, hang_at_exit. It is importable as wandb.
"""

import atexit
import json
import os
import threading
import time

WISHES = dict(
    part.partition(":")[::2] for part in os.environ.get("FAKE_WANDB", "").split(",") if part
)


FILE = os.environ["FAKE_WANDB_FILE"]


def _note(**description: object) -> None:
    with open(FILE, "a") as file:
        file.write(json.dumps(description) + "\n")


class Settings:
    def __init__(self, **_: object) -> None:
        pass


class Table:
    def __init__(self, columns: list[str], data: list[list[object]]) -> None:
        self.columns, self.data = columns, data


class _Run:
    def __init__(self, arguments: dict) -> None:
        self.id = arguments["id"]

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, values: dict) -> None:
        step = str(values["iteration"])
        tables = {
            key: [value.columns, value.data]
            for key, value in values.items()
            if isinstance(value, Table)
        }
        if not tables:
            if WISHES.get("raise") == step:
                raise ConnectionError("no route to host")
            while WISHES.get("hang") == step and not os.path.exists(f"{FILE}.go"):
                time.sleep(0.02)
        plain = {key: value for key, value in values.items() if key not in tables}
        _note(log=plain, tables=tables)

    def finish(self) -> None:
        if "hang_at_finish" in WISHES:
            time.sleep(600)
        _note(finish=True)


def init(**arguments: object) -> _Run:
    print("the library prints what it likes")
    if "no_key" in WISHES:
        raise SystemExit("api_key not configured")
    if "hang_at_exit" in WISHES:
        atexit.register(time.sleep, 600)
        threading.Thread(target=time.sleep, args=[600], name="of a library").start()
    _note(init={key: value for key, value in arguments.items() if key != "settings"})
    return _Run(arguments)
