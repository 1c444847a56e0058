"""The decoder interpreted on a CPU."""
