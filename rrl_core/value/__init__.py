"""The value model: states, their features, how likely success is from them, and its health."""
