"""Layouts of checkpoints that hold a model of text otherwise than transformers' class of it does:
those published with code of their own, and those that hold a model of images beside it.

Their code is never run: a layout says how config.json and the tensors' names become those of the
native class. Whoever opens such a folder sees the native model, and writes that.
"""
