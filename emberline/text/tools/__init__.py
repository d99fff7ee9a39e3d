"""How model families write tool calls and reasoning: in prompts, in grammars, in replies."""
