"""What the tests of ps.DistributedOptimizer share."""

from training_models import sgd

from ringcomm.torch import ps


def wrap(model, make=sgd, **options):
    named = model.named_parameters()
    return ps.DistributedOptimizer(make(model.parameters()), named_parameters=named, **options)
