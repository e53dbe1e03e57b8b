"""Weights: the map between HF and Megatron, publishing to engines, receiving in an engine, HF export.

Kept empty of imports: the engine process imports `pa_npu.weights.receiver` where only torch and vllm are installed.
"""
