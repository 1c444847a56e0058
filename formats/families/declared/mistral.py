"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama whose layers may all have a window.

Ministral 8B has one in some of them.
"""

from formats.families.family import Family

FAMILY = Family(model_types=("mistral", "ministral"))
