"""Compute the results of the `aisp` commands. `CliError` means that a command cannot work."""
