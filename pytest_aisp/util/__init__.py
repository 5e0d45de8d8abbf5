"""Helpers that every layer can use: the device, ranks, nested tensors, git, results of commands."""
