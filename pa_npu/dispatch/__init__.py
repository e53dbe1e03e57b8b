"""Dispatch: in which order prompts go out, when and how many at a time, which groups are trained, and by which replica."""
