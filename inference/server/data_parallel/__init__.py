"""Several engines behind one server: where they run, and which one takes a request."""
