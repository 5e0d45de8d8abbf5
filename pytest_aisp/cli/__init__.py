"""The command line `aisp`: its commands and their options. Other packages compute the results."""
