"""Varlen attention kernels, one file per platform; `registry.kernel_for` chooses."""
