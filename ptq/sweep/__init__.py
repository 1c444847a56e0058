"""Many recipes and models: tasks, where they run, and the one table of them all."""
