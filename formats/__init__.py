"""What is on disk: scheme vocabulary, packing, checkpoints, scale tables."""

from formats.namespace import join_kernels

join_kernels()
