"""Standard tasks through lm-eval on our engine, and tasks that need no network."""
