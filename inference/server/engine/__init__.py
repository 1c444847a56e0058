"""The process that owns the engine, and the socket between it and HTTP."""
