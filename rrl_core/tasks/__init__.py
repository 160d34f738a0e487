"""Problems and their judges: prompts with stable ids, exact answers, guarded scores."""
