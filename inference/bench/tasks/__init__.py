"""Requests made of text, for what speculation brings where texts repeat."""
