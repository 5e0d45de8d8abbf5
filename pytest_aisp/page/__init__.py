"""The declarations of a page (sides, cases and required features), and digests of its sources."""
