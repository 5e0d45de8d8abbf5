"""Timing: the schedule of windows, the timers, and the checks of the measured times."""
