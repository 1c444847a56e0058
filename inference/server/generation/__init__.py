"""From a checked body to requests of the engine, and from their tokens to parts of an answer."""
