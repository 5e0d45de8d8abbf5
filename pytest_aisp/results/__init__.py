"""Plain data and arithmetic: schedules, statistics, verdicts, rows, stored results.

These modules import only the standard library.
"""
