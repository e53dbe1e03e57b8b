"""Checkpoints of a run: their directories, when they are written and by whom, and what may continue from them."""
