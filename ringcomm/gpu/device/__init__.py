"""One GPU as one process uses it: CUDA, its memory, host memory that it reaches."""
