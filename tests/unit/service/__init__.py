"""Tests of the training service."""
