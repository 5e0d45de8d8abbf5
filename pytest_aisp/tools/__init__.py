"""What the command line `aisp` answers."""
