"""Evaluation without engines: statistics with intervals, results per question, comparison of two of them."""
