"""The reinforcement learning of RRL: what computes, and knows nothing of storage."""
