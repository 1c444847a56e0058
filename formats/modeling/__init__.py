"""A checkpoint's model in transformers' own code: on the meta device, looked at, and loaded."""
