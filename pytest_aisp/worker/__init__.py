"""The worker process, which builds, checks and times sides, and the pipe to the process.

`python -m pytest_aisp.worker` starts the process.
"""
