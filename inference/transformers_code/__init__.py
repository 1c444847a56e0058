"""Models run by transformers' own code, with our linear layers and our paged cache inside."""
