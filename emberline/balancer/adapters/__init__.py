"""How other people's servers are driven when one computes the prompt and another the reply: one file per pattern."""
