"""Timing: the schedule of windows, the timers, and the checks that prove their times."""
