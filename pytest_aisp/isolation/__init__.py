"""Detects what a side changes outside its own work: settings, threads, functions, imports."""
