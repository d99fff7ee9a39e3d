"""Rules around a request to a provider: routes, retries, cache, guardrails, log."""
