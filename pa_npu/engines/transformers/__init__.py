"""The engine for debugging: Hugging Face's own model, one token of one response at a time, slow and exact."""
