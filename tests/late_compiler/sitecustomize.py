"""Ranks of the tests' jobs load torch's compiler when they use it. Python imports this by itself.

The first step of an optimizer imports torch._dynamo, for functions that do nothing outside of
torch.compile(). That takes 1.3 s of a core in each rank, as long as torch itself.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "torch._dynamo"


class Compiler(ModuleType):
    """Is torch._dynamo until somebody asks for more than what an uncompiled step uses."""

    def graph_break(self, *_, **__):
        """Do what it does outside of torch.compile()."""

    def disable(self, fn=None, *_, **__):
        return self.disable if fn is None else fn

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":  # which imports of submodules ask for
            raise AttributeError(name)
        return getattr(loaded(), name)


class OfDDP(ModuleType):
    """Is torch._dynamo.utils, likewise; DistributedDataParallel asks for the mode."""

    def get_optimize_ddp_mode(self):
        return "ddp_optimizer"  # by default

    def __getattr__(self, name):
        return getattr(loaded().utils, name)


def loaded():
    """Return the real one, in the place of this one."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        del sys.modules[NAME]
    return importlib.import_module(NAME)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(NAME, self) if fullname == NAME else None

    def create_module(self, spec):
        return None  # an empty one

    def exec_module(self, module):
        module.utils = OfDDP(f"{NAME}.utils")
        module.__class__ = Compiler


FINDER = Finder()
sys.meta_path.insert(0, FINDER)
