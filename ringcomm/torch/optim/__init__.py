"""DistributedOptimizer: gradients are reduced over all ranks while backward() runs."""
