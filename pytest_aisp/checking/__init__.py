"""Check the outputs of sides: input values, reference, error bounds, and negative controls."""
