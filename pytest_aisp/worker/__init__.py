"""The worker process and the pipe to it. The process builds, checks and times sides.

`python -m pytest_aisp.worker` starts the process.
"""
