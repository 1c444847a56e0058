"""`ptq serve`: HTTP in one process, the engine in another, messages between them."""
