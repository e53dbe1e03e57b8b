"""What the processes of a run tell each other: a channel over the run's store, and the messages on it."""
