"""What methods share: the block that they work on, and the mathematics of more than one of them."""
