"""The chat page: one HTML file with its style and script in it, and the route that serves it."""
