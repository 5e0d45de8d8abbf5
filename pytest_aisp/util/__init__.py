"""What all that runs on a machine shares: the device, ranks, trees of tensors, protections."""
