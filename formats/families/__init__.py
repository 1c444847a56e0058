"""Model families: one declaration each."""
