"""Models on other people's servers: requests go there as bodies, come back as bytes or as text events, and are counted
as all others are."""
