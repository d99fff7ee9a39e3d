"""The servers we measure ourselves against, each set up by name in an environment of its own."""
