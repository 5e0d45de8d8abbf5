"""The command line `aisp`: commands and their options. `tools` computes what they print."""
