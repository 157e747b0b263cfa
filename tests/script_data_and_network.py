"""What scripts of jobs in training have in common, as text."""

# Each step has data of its own for each rank, and each rank the same first weights.
DATA_AND_NETWORK = """
mse = torch.nn.functional.mse_loss

def data(step, member):
    like = {"generator": torch.Generator().manual_seed(step * 100 + member), "dtype": torch.float64}
    return torch.randn(8, 16, **like), torch.randn(8, 4, **like)

def network(width):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)]
    return torch.nn.Sequential(*layers).double()
"""
