"""Where a run's engines and trainer ranks run: this machine, or the nodes of a Ray cluster (`placement.cluster`)."""
