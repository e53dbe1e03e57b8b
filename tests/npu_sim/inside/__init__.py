"""Tests that need torch_npu in the process; test_npu_sim.py runs them."""
