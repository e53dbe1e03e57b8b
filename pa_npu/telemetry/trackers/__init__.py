"""Experiment trackers: the iteration records and samples of a run in TensorBoard, wandb, SwanLab, MLflow or trackio.

RunRecords ──append──> RUN/trackers/records.jsonl ──read──> thread of a tracker ──> its library

names.py      what a field of the iteration record is called, by the convention of TRL or of verl
feed.py       the file, the threads, and what each tracker has got, so that a resumed run goes on there
tensorboard.py, wandb.py, swanlab.py, mlflow.py, trackio.py     one Tracker each (protocol.py)
"""
