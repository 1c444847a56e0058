"""What is on disk: scheme vocabulary, packing, checkpoints, scale tables."""
