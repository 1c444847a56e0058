"""From a recipe and a model to what happens to each module."""
