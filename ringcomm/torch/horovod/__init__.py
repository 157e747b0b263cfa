"""Horovod's operations, handles and process sets for torch tensors."""
