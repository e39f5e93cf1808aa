"""CUDA kernels in Triton; imported only where a CUDA tensor is updated, so that CPU users need no Triton."""
