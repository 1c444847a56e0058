"""One file a method: what a recipe may say of it, what others may ask of it, and its algorithm."""
