"""The command line `aisp`: its commands and their options; what they answer is made below."""
