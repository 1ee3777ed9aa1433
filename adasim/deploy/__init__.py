"""From a prediction to a server, and from two servers to a verdict."""
