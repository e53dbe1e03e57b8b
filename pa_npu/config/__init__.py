"""The typed configuration tree: YAML files and overrides in (`load`), one validated `Config` out (`schema`)."""
