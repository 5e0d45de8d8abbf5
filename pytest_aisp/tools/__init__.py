"""The command line `aisp`."""
