"""Communication of a run's processes: a channel over the run's store, and the messages on it."""
