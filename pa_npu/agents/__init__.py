"""Trains agents: an OpenAI-compatible server records what the policy writes and makes samples of it."""
