"""One decoder for the Llama-like families."""
