"""Planning a deployment before anything is loaded: which layout of which GPUs holds a model, and how fast it runs."""
