"""Metrics, history, health, status, traces and log lines of requests."""
