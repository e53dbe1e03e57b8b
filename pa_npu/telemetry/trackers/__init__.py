"""Experiment trackers: the iteration records and samples of a run in TensorBoard, wandb, SwanLab, MLflow or trackio.

    RunRecords ──append──> RUN/trackers/records.jsonl ──follow──> process of a tracker (follow.py) ──> its library

Each tracker has a process of its own, which imports its library and nothing heavy of ours, so that what the library does
(imports, threads, networks, hangs, handlers at exit) never reaches the coordinator, and so that it may live in another environment:
three of the libraries hold back packages below what engines install. The file between them is the queue.

    names.py      what a field of the iteration record is called, by the convention of TRL or of verl
    identity.py   the run's id with each tracker and what it has got, kept in RUN/trackers, so that a resumed run goes on there
    feed.py       the coordinator's end; follow.py is the other one
    tensorboard.py, wandb.py, swanlab.py, mlflow.py, trackio.py     one Tracker each (protocol.py)
"""
