"""What the commands of `aisp` compute; `CliError` says why a command cannot answer here."""
