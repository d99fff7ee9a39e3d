"""Engines as the front door sees them: connections, who is in flight where, which engine takes the next request."""
