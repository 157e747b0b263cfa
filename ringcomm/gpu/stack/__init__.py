"""Driver, cupy and NCCL of this machine, and what is missing of them."""
