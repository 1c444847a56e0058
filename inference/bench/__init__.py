"""Where speed is measured: steps, requests and other runtimes."""
