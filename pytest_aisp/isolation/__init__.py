"""Detect side effects of a side: changed settings, threads, replaced functions, imports."""
