"""Model architectures. `registry` maps a checkpoint to its architecture and to the backend that runs it."""
