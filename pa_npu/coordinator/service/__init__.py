"""What the coordinator offers to other programs: prompts in, groups out, other engines' samples, pause and state, over HTTP."""
