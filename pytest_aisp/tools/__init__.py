"""Compute the results of the `aisp` commands. A command that cannot work raises `CliError`."""
