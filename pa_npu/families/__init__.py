"""Model families: config.json to a spec, and the HF files that a model comes in."""
