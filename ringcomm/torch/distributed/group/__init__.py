"""The c10d process group: torch.distributed's operations, carried out by the engine."""
