"""Model families: config.json to a spec, the weights' names and shapes, work and memory; and HF model files."""
