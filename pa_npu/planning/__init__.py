"""Arithmetic on a configuration before anything runs: work, memory, whether it fits, and what to change."""
