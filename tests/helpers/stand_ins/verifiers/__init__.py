"""Stands where verifiers is not installed: what pa_npu/data/verifiers_program.py calls of it."""
