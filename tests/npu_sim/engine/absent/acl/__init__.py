"""Stands for CANN's pyACL, of which vllm-ascend imports one function."""
