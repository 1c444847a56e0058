"""OLMo 3 (Team Olmo 2025): OLMo 2, three of four layers of which have a window.

Where the rotation is scaled for long contexts, it is so in the layers without one.
"""

from dataclasses import replace

from formats.families.declared import olmo2

FAMILY = replace(olmo2.FAMILY, model_types=("olmo3",))
