"""Names of what statistics are kept of, for those who know them without torch."""

from typing import Final

SINK_INPUT: Final = "input_sink"  # rows of sink tokens, which are not among those of "input"
SINK_TOKENS: Final = 16  # ordinary tokens that the relative error of a sink token counts as
