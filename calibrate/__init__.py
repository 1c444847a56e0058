"""From a model and text to statistics."""

from formats.namespace import join_kernels

join_kernels()
