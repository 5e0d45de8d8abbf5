"""`python -m pytest_aisp.commands` is `aisp`."""

import sys

from .cli import main

sys.exit(main())
