"""Durable work. `batches` (batches, files, blobs) is imported by `webhooks` (events, deliveries), both by `queue`."""
