"""TrainBackend on megatron-core, and all that knows Megatron.

`factory.create` makes a rank's backend. `patches.table.prepare` must come before anything imports
megatron.core, and so before any module of this package but factory and patches.
"""
