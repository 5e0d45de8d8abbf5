"""Helpers for every layer: the device, ranks, nested tensors, git, results of commands."""
