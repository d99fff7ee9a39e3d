"""Emberline on many machines."""
