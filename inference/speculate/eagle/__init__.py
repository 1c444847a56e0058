"""Drafts of a head that reads what the model has computed (EAGLE-3)."""
