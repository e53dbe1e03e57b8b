"""Checkpoints of this backend: what a rank saves and restores, its share of the files, and their export as an HF directory."""
