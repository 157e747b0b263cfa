"""One GPU: calls of CUDA, its memory, and host memory that it can access."""
