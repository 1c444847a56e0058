"""Layouts of other software: stateless pairs of reading and writing."""
