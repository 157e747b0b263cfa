"""The faults that ci/mutants plants, one at a time: mistakes that a good engineer could make.

Each imports and sums two float32 arrays over two ranks, so that only a test of the rule that it
breaks can tell. Those in C++ compile.
"""

from mutations.commands import CLIENT
from mutations.cpp import CPP
from mutations.elastic import ELASTIC
from mutations.engine import CACHE, DTYPE, ORDER
from mutations.failures_and_shm import FAULT, NODE
from mutations.gpu import GPU
from mutations.mutation import CATEGORIES, CppMutation, Mutation
from mutations.ps_copies import PS_COPIES
from mutations.ps_core import PS_CORE
from mutations.ps_cpp import PS_CPP
from mutations.ps_deaths import PS_DEATHS
from mutations.ps_outside_core import PS
from mutations.ps_replacements import PS_REPLACEMENTS
from mutations.torch import CHANGES, FACES, OPTIMIZER, REFUSALS

__all__ = ["CATEGORIES", "CPP_MUTATIONS", "MUTATIONS", "CppMutation", "Mutation"]

MUTATIONS = [
    *ORDER,
    *CACHE,
    *DTYPE,
    *FAULT,
    *ELASTIC,
    *OPTIMIZER,
    *REFUSALS,
    *CHANGES,
    *NODE,
    *FACES,
    *PS_CORE,
    *PS_DEATHS,
    *PS_REPLACEMENTS,
    *PS_COPIES,
    *PS,
    *GPU,
    *CLIENT,
]
CPP_MUTATIONS = [*CPP, *PS_CPP]
