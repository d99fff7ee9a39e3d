"""Emberline: an inference platform for agents that you run on your own machines."""

__version__ = "0.2.0"
