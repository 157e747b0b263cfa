"""NVIDIA's driver, cupy and NCCL on this machine, and what is missing of them."""
