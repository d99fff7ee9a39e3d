"""Several ranks as one engine: forming a group, the collectives between them, and the plan of each step for all."""
