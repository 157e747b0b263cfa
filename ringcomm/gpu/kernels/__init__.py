"""CUDA kernels: source, arguments and compilation."""
