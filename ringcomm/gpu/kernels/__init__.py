"""CUDA kernels: their source, what each takes, and the compiler."""
