"""The command line `aisp`: its commands and their options. `tools` computes the results."""
