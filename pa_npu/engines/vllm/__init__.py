"""The engine for training: all that knows vLLM: its command, HTTP paths, versions and workers."""
