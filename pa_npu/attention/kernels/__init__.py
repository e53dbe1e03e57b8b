"""Varlen attention kernels, one file per platform; `forms.kernel_for` chooses."""
