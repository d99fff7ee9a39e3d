"""Binds a reply to a grammar: masks for the sampler, and the shortest way to a valid end."""
