"""Everything that this backend changes in torch, numpy and Megatron for the whole process: one list, `table.PATCHES`."""
