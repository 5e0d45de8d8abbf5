"""Nothing but pytester: the plugin is installed, the pages need no conftest."""

pytest_plugins = ["pytester"]
