"""Configurations of the stand-in."""
