"""Other runtimes, measured beside the engine on the same shape and loads."""
