"""What a page declares: its sides, cases and required features. Also digests of its sources."""
