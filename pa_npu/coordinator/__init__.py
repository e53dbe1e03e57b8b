"""The coordinator process: prompts in, groups out, engines under control."""
