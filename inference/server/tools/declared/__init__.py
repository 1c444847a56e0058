"""One file a format in which models write calls; each holds a `FORMAT`."""
