"""Ascend C operators: kernels, host tiling, torch binding, their build, and a CPU model of the API for tests."""
