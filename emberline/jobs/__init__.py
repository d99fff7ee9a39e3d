"""Durable work: the queue, its batches, and the events that tell of them."""
