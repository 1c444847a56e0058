"""Ways to answer a call: each reads its body, and writes answers whole or in events."""
