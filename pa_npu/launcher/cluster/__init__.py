"""Places for a run's engines and trainer ranks: this machine, or the nodes of a Ray cluster (`placement.cluster`)."""
