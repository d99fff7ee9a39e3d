"""Types that cross process borders, and pure functions over them. No torch, no I/O."""
