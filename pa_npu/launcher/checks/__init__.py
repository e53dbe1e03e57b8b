"""Checks of a run's surroundings, by subject: findings, model, data, engines and trackers, machine."""
