"""Only pytester: the installed plugin does the rest, and pages need no conftest."""

pytest_plugins = ["pytester"]
