"""Varlen attention kernels, one file per platform; `base.kernel_for` chooses."""
