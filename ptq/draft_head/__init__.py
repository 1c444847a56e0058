"""Heads that draft a model's next tokens, trained for it."""
