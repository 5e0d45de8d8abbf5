"""CUDA C++ and Triton kernels: compile and launch them, and read their machine code."""
