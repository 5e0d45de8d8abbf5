"""Pages on several ranks, and the links between their GPUs."""
