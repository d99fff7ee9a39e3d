"""Emberline compared with its peers: the scripts behind every figure in the documentation."""
