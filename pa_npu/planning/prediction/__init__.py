"""Predicts a run with devices and settings that were not tried, from the records of one that was, or from published figures.

records        what a run has left: when groups were generated and trained, their lengths, borders
costs          what engines and trainers take for a piece of work, and how that goes over to another model, layout or device
calibration    costs fitted to records
workload       prompts and lengths like those that were seen
virtual_run    some iterations of a configuration in virtual time, under the schedules that the run's own controller chooses
cluster_plan   how to divide a number of devices, and what follows; limits: what there is only once, however many devices
plan_report    plans as text and JSON; plan_plot: as a picture
figures        a number with its interval and where it is from
"""
