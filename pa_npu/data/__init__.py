"""Prompts and rewards: what is asked, and what an answer is worth."""
