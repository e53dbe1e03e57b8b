"""Training backends behind the TrainBackend protocol: what turns microbatches into an update."""
