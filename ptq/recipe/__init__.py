"""The recipe: its strict model, its reader and its problems."""
