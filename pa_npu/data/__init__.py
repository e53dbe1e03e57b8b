"""Prompts: dataset rows read, rendered with the chat template, tokenised, and served in seeded epochs."""
