"""Run pages on several ranks, and measure the links between GPUs."""
