"""Dispatch: when prompts go to which engine, and which replica trains a group."""
