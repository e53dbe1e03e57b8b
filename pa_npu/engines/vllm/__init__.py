"""Everything that knows vLLM, the engine for training: its command, its HTTP paths, its versions, what runs inside it."""
