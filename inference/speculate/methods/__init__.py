"""One file a proposer, which registers itself: its `METHOD` (`inference.proposers`)."""
