"""A fleet: one suite over many GPU machines, on Ray. Only `bridge` and `start` import Ray."""

PROTOCOL = 1
"""The version of the messages between pytest here and pytest on a node."""
