"""From a checkpoint to tokens."""

from formats.namespace import join_kernels

join_kernels()
