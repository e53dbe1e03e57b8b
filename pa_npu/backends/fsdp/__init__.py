"""The training backend on torch's FSDP2: models of transformers as they are, sharded over the trainer ranks."""
