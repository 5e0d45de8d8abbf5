"""The declaration on a page: a pair of sides, its cases and needs, and digests of its sources."""
