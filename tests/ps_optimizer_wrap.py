"""What the tests of ps.DistributedOptimizer share."""

from ps_ranks_as_threads import run_workers
from training_models import copies, network, sgd

from ringcomm.torch import ps


def wrap(model, make=sgd, **options):
    named = model.named_parameters()
    return ps.DistributedOptimizer(make(model.parameters()), named_parameters=named, **options)


def on_workers(n, body, n_servers=1, model=None, **options):
    """Run body(rank, model, optimizer) on n workers, each with a copy of the model."""
    replicas = copies(network() if model is None else model, n)
    return run_workers(
        n, lambda rank: body(rank, replicas[rank], wrap(replicas[rank], **options)), n_servers
    )
