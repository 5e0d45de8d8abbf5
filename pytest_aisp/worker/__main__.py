"""The worker process as a program: see `server`."""

import sys

from .server import main

main(int(sys.argv[1]), int(sys.argv[2]))
