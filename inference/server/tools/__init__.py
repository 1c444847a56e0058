"""Tool calls: how a model is told of tools, is made to call them, and how its calls are read."""
