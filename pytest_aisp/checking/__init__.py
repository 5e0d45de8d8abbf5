"""Sides made ready and proved right: values, reference, bounds, controls."""
