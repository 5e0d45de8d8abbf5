"""Find what the steps of a training loop wait for, and suggest what to change first."""
