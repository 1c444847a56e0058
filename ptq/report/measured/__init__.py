"""What the report measures beside accuracy and speed: where the loss comes from, completions."""
