"""What the learner computes, as pure functions on tensors: torch only, no state, no settings."""
