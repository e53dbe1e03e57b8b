"""Dispatch: in which order prompts go out, how many at a time, which groups are trained, and by which replica."""
