"""Weights between Megatron's form and Hugging Face's: the map of names, loading, buckets for the wire, HF directories."""
