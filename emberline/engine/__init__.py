"""Token ids in, token ids out: the scheduler, the step loop and the process around them."""
