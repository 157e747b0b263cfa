"""Ranks of the tests' jobs load of torch what they use. Python imports this module by itself.

`import torch` also loads what is for torch.compile() and for tensors without data, and the first
step of an optimizer imports torch._dynamo, for functions that do nothing outside of that. Without
these, a rank takes 1 s of a core for torch, not 3; ci/length runs all tests with them.
"""

import functools
import gc
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Without collections of garbage while these load, nor later of what they are made of, a rank
# without torch takes 0.23 s of a core, not 0.29.
LARGE = ("torch", "numpy", "ringcomm.engine.api.init_rank_size")
COMPILER = "torch._dynamo"
META = "torch._meta_registrations"  # operators in Python for tensors without data
USERS_OF_META = ("torch._decomp", "torch._prims", "torch._refs", "torch.distributed.tensor")


class Compiler(ModuleType):
    """Is torch._dynamo until somebody asks for more than what an uncompiled step uses."""

    def begin(self):
        self.utils = OfDDP(f"{COMPILER}.utils")
        self.trace_rules = OfGroups(f"{COMPILER}.trace_rules")

    def graph_break(self, *_, **__):
        """Do what it does outside of torch.compile()."""

    def disable(self, fn=None, *_, **__):
        return self.disable if fn is None else fn

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":  # which imports of submodules ask for
            raise AttributeError(name)
        return getattr(loaded(COMPILER), name)


class OfDDP(ModuleType):
    """Is torch._dynamo.utils, likewise; DistributedDataParallel asks for the mode."""

    def get_optimize_ddp_mode(self):
        return "ddp_optimizer"  # by default

    def __getattr__(self, name):
        return getattr(loaded(COMPILER).utils, name)


class OfGroups(ModuleType):
    """Is torch._dynamo.trace_rules, likewise; init_process_group() clears what it knows."""

    def clear_lru_cache(self):
        """Do nothing: nothing is known yet."""

    def __getattr__(self, name):
        return getattr(loaded(COMPILER).trace_rules, name)


class Meta(ModuleType):
    """Is torch._meta_registrations until somebody asks for it, or imports a module that uses it."""

    def begin(self):
        """Do what torch.Generator() needs, which a module does that this would import."""
        core = sys.modules["torch._C"]
        if hasattr(core, "_set_generator_metaclass"):  # from torch 2.13 on
            core._set_generator_metaclass(
                importlib.import_module("torch._opaque_base").OpaqueBaseMeta
            )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(loaded(META), name)


def loaded(name):
    """Return the real one, in the place of this one."""
    if name == COMPILER:
        loaded(META)  # which the compiler could not import half-way
    if LATE.pop(name, None):
        sys.modules.pop(name, None)
    return importlib.import_module(name)


class Finder:
    """Finds and loads; without the base classes of importlib.abc, whose import takes 20 ms."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in LARGE:
            return without_collections(PathFinder.find_spec(fullname, path, target))
        if fullname in USERS_OF_META and META in LATE:
            return ModuleSpec(fullname, AfterMeta())
        return ModuleSpec(fullname, self) if fullname in LATE else None

    def create_module(self, spec):
        return None  # an empty one

    def exec_module(self, module):
        module.__class__ = LATE[module.__name__]
        module.begin()


class AfterMeta:
    """Loads the real torch._meta_registrations, which may import the module itself, and then it."""

    def create_module(self, spec):
        loaded(META)
        return importlib.import_module(spec.name)

    def exec_module(self, module):
        """Do nothing: it has run."""


def without_collections(spec):
    """Let no garbage be looked for in a module while it loads, nor later in what it loaded."""
    if spec is None:
        return None
    load = spec.loader.exec_module

    @functools.wraps(load)
    def exec_module(module):
        was_enabled = gc.isenabled()  # not if a large one imports this one
        gc.disable()
        try:
            load(module)
        finally:
            if was_enabled:
                gc.enable()
        gc.freeze()

    spec.loader.exec_module = exec_module
    return spec


LATE = {COMPILER: Compiler, META: Meta}
sys.meta_path.insert(0, Finder())
