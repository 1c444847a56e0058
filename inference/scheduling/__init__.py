"""Requests, the scheduler and the sampler: what the engine keeps of a request; no model."""
