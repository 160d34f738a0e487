"""The policy: model, adapters, packing, log-probs, learner."""
