"""CUDA C++ and Triton kernels: compile, launch, assemble for any GPU, read machine code."""
