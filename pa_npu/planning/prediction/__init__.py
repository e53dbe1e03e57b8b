"""Predicts a run before it starts, from published figures of a usual device.

costs          seconds of an engine and a trainer for a piece of work, by model, layout and device
workload       prompts and lengths, assumed or like those that a run has seen
virtual_run    some iterations of a configuration, under the schedules that its coordinator would
               choose
divisions      shares of the devices for engines and for trainers
search         all sizes that fit, by a quick estimate, and the best of them by prediction

tools/plan_cluster.py predicts runs from the records of one that ran.
"""
