"""`python -m pytest_aisp.cli` is `aisp`."""

import sys

from .app import main

sys.exit(main())
