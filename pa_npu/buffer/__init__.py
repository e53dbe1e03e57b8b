"""Shared rollout buffer: group wire format, host-side store, and the trainer's microbatch iterator."""
