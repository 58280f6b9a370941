"""Let a target answer conversations, as training data for what drafts for it."""
