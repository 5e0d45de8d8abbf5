"""Plain data and arithmetic: schedules, statistics, verdicts, rows, stored results.

Imports the standard library alone.
"""
