"""The worker process: sides built, timed on a clock, checked again; and the pipe to it.

`python -m pytest_aisp.worker` is the program.
"""
