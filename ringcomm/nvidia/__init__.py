"""Finds NVIDIA's driver, cupy and NCCL on this machine, and says what is missing."""
