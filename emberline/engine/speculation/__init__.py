"""Speculative decoding: drafters propose tokens, a step verifies them, a policy chooses how many are worth it."""
