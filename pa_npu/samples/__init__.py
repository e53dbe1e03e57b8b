"""Data from engine to loss: samples and groups, wire format, rollout buffer, microbatches."""
