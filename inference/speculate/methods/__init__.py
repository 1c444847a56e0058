"""One file a proposer, which is found by its `METHOD` (`inference.proposers`)."""
