"""Run `aisp` as `python -m pytest_aisp.cli`."""

import sys

from .app import main

sys.exit(main())
