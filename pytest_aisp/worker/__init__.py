"""The worker process, which builds, checks and times sides, and the pipe to it.

`python -m pytest_aisp.worker` is the program.
"""
