"""What a side may do beside its work: switches, leftovers, replaced functions, imports."""
