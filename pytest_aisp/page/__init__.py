"""The declaration of a page: a pair of sides, its cases, its needs, and digests of its sources."""
