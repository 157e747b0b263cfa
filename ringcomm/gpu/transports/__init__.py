"""How GPU arrays travel between ranks: NCCL, CUDA IPC, and the choice between them."""
