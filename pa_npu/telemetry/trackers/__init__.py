"""Experiment trackers: the iteration records and samples of a run in TensorBoard, wandb, SwanLab, MLflow or trackio.

    RunRecords ──put──> TrackerFeed: bounded queue ──thread──> pipe ──> process of the tracker (worker.py) ──> its library
                        (one per tracker)          <──answer, with a deadline──

Each tracker has a process of its own, which imports its library and nothing heavy of ours, so that what the library does
(imports, threads, networks, hangs, handlers at exit) never reaches the coordinator. `put` returns at once; what does not fit into
the queue, is refused, or is not answered in time is lost to that tracker, counted, and said once.

    names.py      what a field of the iteration record is called, by the convention of TRL or of verl
    identity.py   the run's id with each tracker and what it has got, kept in RUN/trackers, so that a resumed run goes on there
    feed.py       the coordinator's end; worker.py is the other one
    tensorboard.py, wandb.py, swanlab.py, mlflow.py, trackio.py     one Tracker each (protocol.py)
"""
