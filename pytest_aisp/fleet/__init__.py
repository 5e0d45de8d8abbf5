"""Run one suite on many GPU machines with Ray. Only `bridge` imports Ray."""

PROTOCOL = 2
"""The version of the messages between the main pytest process and pytest on a node."""
