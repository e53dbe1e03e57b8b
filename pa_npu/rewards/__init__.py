"""Reward functions: what an answer is worth, and the worker processes that find out."""
