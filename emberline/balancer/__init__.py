"""Admission control, routing and the in-flight ledger: which worker computes which request, and when."""
