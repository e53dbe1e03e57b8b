"""Rewards: answer extraction, reward functions, and the worker processes that run them."""
