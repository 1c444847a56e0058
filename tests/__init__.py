"""Tests, and what several of them share; a package, so that no other of the name is imported."""
