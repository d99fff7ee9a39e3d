"""The nouns that cross process borders, and the pure functions over them. No torch, no I/O."""
