"""Environments: how a prompt becomes samples, in one turn, with tools, or by a class of your own."""
