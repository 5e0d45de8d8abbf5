"""What a page declares: a pair of sides, its cases, its needs, and the digests of its sources."""
