"""Outputs that match a schema, an expression or a grammar, by masks of the tokens that may come."""
