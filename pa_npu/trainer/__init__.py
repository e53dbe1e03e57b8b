"""The trainer process, one per rank: its entry, the training loop, the border between iterations, and the invariants' checks."""
