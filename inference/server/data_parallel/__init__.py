"""Data parallelism: several engines of one server, and which takes a request."""
