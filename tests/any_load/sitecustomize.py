"""Make worker processes measure on a busy machine. Python imports this file when it starts.

Tests add this folder to `sys.path`, from which workers take theirs. A page cannot do this, because
it must not change a constant of the plugin.
"""

import math

from pytest_aisp.util import cpu_load

cpu_load.STOLEN = math.inf
