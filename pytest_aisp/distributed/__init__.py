"""Several ranks: started together, asked together; the links between their GPUs."""
