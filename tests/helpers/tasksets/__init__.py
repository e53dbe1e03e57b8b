"""Tasksets of verifiers. The folder is on PYTHONPATH of the interpreter that has the package."""
