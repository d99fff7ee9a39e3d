"""Vision towers: tiles of images to rows that replace embeddings. `loading` reads one from a checkpoint."""
