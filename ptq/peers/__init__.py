"""What other packages make of the same model, measured beside our own: peers in the report."""
