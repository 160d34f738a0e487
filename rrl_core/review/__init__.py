"""Self-review (SRRL, arXiv 2607.05541): pure functions, no torch, no storage, no settings."""
