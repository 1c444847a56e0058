"""Data parallelism: several engines behind one server, where they run, and who takes a request."""
