"""Find out what the steps of a training loop wait for, and what to change first."""
