"""CUDA C++ and Triton: compiled, launched, assembled for any GPU, their machine code read."""
