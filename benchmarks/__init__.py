"""Emberline beside its peers: the scripts behind every number we state."""
