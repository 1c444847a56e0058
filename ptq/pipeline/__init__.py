"""The driver: block by block from a plan to a checkpoint; resumable."""
