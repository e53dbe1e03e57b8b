"""Rollout: engine server processes, their client and pool, the admission window, the producer and the coordinator."""
