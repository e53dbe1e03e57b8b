"""Checkpoints of a run: directories, when and by whom they are written, what may continue from them."""
