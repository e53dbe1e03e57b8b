"""Arithmetic on a configuration before anything runs: work, memory, fit, and what to change.

amounts         sequences, microbatches and tokens of an iteration
memory          bytes on a device, for each role
shortages       what does not fit, and the keys that would make it fit
model_rules     what the model's sizes demand of the configuration
plan_text       all of it as lines, for --dry-run
automatic       chooses the sizes that the configuration leaves open
prediction/     how long a run, or other sizes of it, would take, from published figures
known_models    shapes of public models, to plan without having them
"""
