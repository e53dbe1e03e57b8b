"""Triton kernels, the CUDA counterparts of ops/ascendc.

Importing a module in here imports triton.
"""
