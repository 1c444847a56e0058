"""Bodies of requests: strict models, in which every field is honoured or refused by its name."""
