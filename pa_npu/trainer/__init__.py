"""The trainer process, one per rank: entry, training loop, iteration border, invariants' checks."""
