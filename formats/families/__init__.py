"""What a model family is, as data: one declaration each in `declared`, and what follows from it."""
