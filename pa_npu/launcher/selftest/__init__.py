"""The self-test: whether a machine's devices, libraries and processes do what this package relies on, and how fast.

Parts (`parts.py`) run one after another, each in a process of its own with a deadline, and a part
that fails does not end the others. `command.py` writes what they found to a folder that can be sent
to others: figures, records and logs, without secrets.
"""
