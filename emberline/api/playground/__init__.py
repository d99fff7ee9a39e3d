"""Pages for people: the playground at `/`, and the assets that every page shares."""
