"""What a page says: a pair of sides, its cases, what it needs, the sources it consists of."""
