"""One iteration in virtual time: what a schedule would take, learned from a run's own iterations, and which to choose."""
