"""Images in requests: where they come from, what bounds them, and how they are decoded in confined processes."""
