"""Images of prompts: where their rows stand, what a step may encode, and the cache of encoded rows."""
