"""Trainer ranks: the entry, the loop, the step, the iteration border, checkpoints."""
