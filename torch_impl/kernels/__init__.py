"""Compiled kernels: Triton for CUDA, which is imported only where a CUDA tensor is updated, and C for CPU."""
