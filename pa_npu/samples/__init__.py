"""Data from engine to loss: samples and groups, their wire format, the rollout buffer, the trainer's microbatches."""
