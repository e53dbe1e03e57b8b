"""Watching a run: one page over a run directory, served on loopback or exported as one HTML file; it only reads."""
