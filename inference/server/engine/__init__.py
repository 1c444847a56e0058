"""The process that owns the engine: how it is started and ends, and what it does."""
