"""Advantages, token weights and losses: pure functions of arrays and tensors."""
