"""Everything that knows vLLM: its command line, its HTTP interface, its versions, and the worker extension inside it."""
