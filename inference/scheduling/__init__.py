"""Which requests run when, in which blocks of the cache, and how tokens are chosen; no model."""
