"""Predicts a run before it starts, from published figures; tools/plan_cluster.py predicts others from the records of one that ran.

costs          what engines and trainers take for a piece of work, by model, layout and device
workload       prompts and lengths, assumed or like those that were seen
virtual_run    some iterations of a configuration, under the schedules that its coordinator would
               choose
divisions      how to divide a number of devices
"""
