"""vLLM in the place of our engine: what it can take of a checkpoint, and how it is started."""
