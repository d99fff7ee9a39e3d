"""Predictors that users bring along (Cog projects): pushed as versions of a model, served by sandboxed workers."""
