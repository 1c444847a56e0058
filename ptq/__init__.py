"""From statistics to quantized weights: recipes, methods, the driver, the report."""

from formats.namespace import join_kernels

join_kernels()
