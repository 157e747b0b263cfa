"""Transports of GPU arrays: NCCL, CUDA IPC, and the choice between them."""
