"""The runtime on NVIDIA GPUs; needs Triton, and is imported where a model is put on one."""
