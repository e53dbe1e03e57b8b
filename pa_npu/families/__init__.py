"""Model families: config.json to a spec, names and shapes of weights, work, memory, and HF files."""
