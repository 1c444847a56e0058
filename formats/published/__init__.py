"""Layouts of checkpoints that came with code of their own, for models transformers has a class of.

Their code is never run: a layout says how config.json and the tensors' names become those of the
native class. Whoever opens such a folder sees the native model, and writes that.
"""
