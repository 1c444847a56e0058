"""Speculative decoding: what proposes drafts of the next tokens, and how many a step has."""
