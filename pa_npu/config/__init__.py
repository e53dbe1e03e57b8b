"""The typed configuration tree, YAML and overrides, and preflight arithmetic."""
