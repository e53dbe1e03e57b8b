"""The viewer: a page over a run directory, served on loopback or exported as one HTML file."""
