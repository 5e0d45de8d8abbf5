"""Detect side effects: changed settings, leftover threads, replaced functions, imports."""
