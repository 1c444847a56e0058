"""What routes share: reading bodies, errors, middleware, streams of events, the description."""
