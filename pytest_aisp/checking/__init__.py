"""Prepare sides and check them: values, reference, error bounds, and negative controls."""
