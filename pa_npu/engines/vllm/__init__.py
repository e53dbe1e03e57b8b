"""The engine for training: all that knows vLLM, which is its command, its HTTP paths, its versions and what runs inside it."""
