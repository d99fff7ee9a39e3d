"""Engine workers as a core sees them: connections, membership, served models, scaling."""
