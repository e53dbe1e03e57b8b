"""The model side: Megatron GPT from an HF config, log-probs, tri-model stage, and the rank's parallel groups.

`parallel.initialise_parallel` once per rank, then `stage.build_stage`; both need `platform.prepare_megatron()` first.
"""
