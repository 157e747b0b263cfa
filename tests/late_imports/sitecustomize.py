"""Ranks of the tests' jobs load of torch and numpy what they use. Python imports this by itself.

`import torch` also loads what is for torch.compile() and for tensors without data, and the first
step of an optimizer imports torch._dynamo, for functions that do nothing outside of that. Without
these, a rank takes 0.9 s of a core for torch, not 3. Other parts, and texts for help(), load when
somebody asks for them. Methods that dataclasses generates are compiled once, not by each rank.
ci/all_cases runs all tests without this module.
"""

import atexit
import collections
import functools
import gc
import importlib
import marshal
import operator
import os
import sys
from importlib import _bootstrap, _bootstrap_external
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Without collections of garbage while these load, nor later of what they are made of, a rank
# without torch takes 0.23 s of a core, not 0.29.
LARGE = ("torch", "numpy", "ringcomm.engine.api.init_rank_size")
COMPILER = "torch._dynamo"
SHAPES = "torch.fx.experimental.symbolic_shapes"  # it imports sympy, which takes 2 s
META = "torch._meta_registrations"  # operators in Python for tensors without data
COMPARISON = "torch.testing._comparison"  # each comparison imports DTensors, for which META loads
DTENSORS = "torch.distributed.tensor"
# What else these find loaded already where a whole torch is.
FIRST = {
    "torch.fx.experimental.proxy_tensor": "torch.fx.passes",  # the two import each other
    "torch.utils.checkpoint": "torch._subclasses.functional_tensor",
}
PARTS = (
    "numpy._core._add_newdocs",
    "numpy._core._add_newdocs_scalars",
    "platform",
    "textwrap",
    "torch._size_docs",
    "torch._storage_docs",
    "torch._tensor_docs",
    "torch._torch_docs",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.hub",
    "torch.masked",
    "torch.nn.attention",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.profiler",
    "torch.quantization",
    "torchgen.model",
    "unittest.mock",
)
# Packages whose submodules load without them, and what else is imported from them.
PACKAGES = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._higher_order_ops.invoke_subgraph": ("NestedCompileRegionOptions",),
    "torch.func": ("vmap",),
    "unittest": (),
}
USERS_OF_META = ("torch._decomp", "torch._prims", "torch._refs", DTENSORS)


class Compiler(ModuleType):
    """Is torch._dynamo until somebody asks for more than what an uncompiled step uses."""

    def begin(self):
        self.utils = OfDDP(f"{COMPILER}.utils")
        self.trace_rules = OfGroups(f"{COMPILER}.trace_rules")
        self.config = OfCheckpoints(f"{COMPILER}.config")

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


class OfCheckpoints(ModuleType):
    """Is torch._dynamo.config, likewise; checkpoints that are not reentrant ask for this."""

    error_on_nested_fx_trace = True  # by default

    def __getattr__(self, name):
        return getattr(loaded(COMPILER).config, name)


class Shapes(ModuleType):
    """Is what backward() asks for once it is given gradients, until somebody asks for more."""

    def begin(self):
        self.sym_eq, self.expect_true = operator.eq, expect_true  # of tuples of integers

    def __getattr__(self, name):
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return getattr(loaded(SHAPES), name)


def expect_true(a, skip=0):
    return a if isinstance(a, bool) else loaded(SHAPES).expect_true(a, skip)


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
        for other in ("torch.export", "torch.func", "torch._higher_order_ops"):
            if isinstance(sys.modules[other], Part):
                sys.modules[other].load()
    if LATE.pop(name, None):
        sys.modules.pop(name, None)
    return importlib.import_module(name)


class Part(ModuleType):
    """Is a module whose code runs once somebody asks for what it defines, also for a submodule."""

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)
        self.load()
        return ModuleType.__getattribute__(self, name)

    def load(self):
        """Be the module itself."""
        with _bootstrap._ModuleLockManager(self.__name__):  # this thread may come again
            if LATE.pop(self.__name__, None):
                spec = spec_of(self.__name__)
                _bootstrap._init_module_attrs(spec, self, override=True)
                spec.loader.exec_module(self)
                self.__class__ = ModuleType

    def begin(self):
        """Do nothing: nobody has asked."""


class Package(Part):
    """Is a package until somebody asks for more than for its submodules, or calls what is in it."""

    def begin(self):
        self.__path__ = spec_of(self.__name__).submodule_search_locations
        for name in PACKAGES[self.__name__]:
            setattr(self, name, type(name, (Function,), {"home": self}))


class Function:
    """Is a function or class of a package, which loads once it is called; may be an annotation."""

    def __new__(cls, *arguments, **options):
        if isinstance(cls.home, Package):
            cls.home.load()
        return getattr(cls.home, cls.__name__)(*arguments, **options)


class Typing(Part):
    """Is numpy.typing until somebody asks for more than what annotations use."""

    def begin(self):
        self.ArrayLike = self.DTypeLike = self.NDArray = Type
        parent, _, name = self.__name__.rpartition(".")
        self.__path__ = [f"{each}/{name}" for each in sys.modules[parent].__path__]


class Type:
    """Is a type of numpy.typing in annotations, which nobody reads."""

    def __class_getitem__(cls, _):
        return cls


class Finder:
    """Finds and loads; without the base classes of importlib.abc, whose import takes 20 ms."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "dataclasses":
            return ModuleSpec(fullname, Dataclasses())
        if fullname == "typing":
            return ModuleSpec(fullname, Typings())
        if fullname in LARGE:
            return without_collections(PathFinder.find_spec(fullname, path, target))
        if fullname == COMPARISON:
            return without_dtensors(PathFinder.find_spec(fullname, path, target))
        if fullname in USERS_OF_META and META in LATE:
            return ModuleSpec(fullname, After(META))
        if fullname in FIRST and FIRST[fullname] not in sys.modules:
            return ModuleSpec(fullname, After(FIRST[fullname]))
        return ModuleSpec(fullname, self) if fullname in LATE else None

    def create_module(self, spec):
        return None  # an empty one

    def exec_module(self, module):
        module.__class__ = LATE[module.__name__]
        module.begin()


class Compiled:
    """Runs the text of a method of a dataclass, for which it keeps byte code beside this file.

    To compile the texts takes a rank 0.03 s of 0.25 s, and three times that with torch.
    """

    FOLDER = f"{os.path.dirname(__file__)}/__pycache__"
    MAGIC = _bootstrap_external.MAGIC_NUMBER.hex()

    def __init__(self):
        self.known = {}  # by package: byte code by text
        self.grown = set()

    def exec(self, text, variables, names):
        """Do what exec() does."""
        package = ".".join(variables["__name__"].split(".")[:2])
        known = self.known.get(package)
        if known is None:
            known = self.known[package] = self.read(package)
        code = known.get(text)
        if code is None:
            code = known[text] = compile(text, "<string>", "exec")
            if not self.grown:
                atexit.register(self.write)
            self.grown.add(package)
        exec(code, variables, names)

    def read(self, package):
        try:
            with open(self.path(package), "rb") as file:
                return marshal.load(file)
        except FileNotFoundError:
            return {}

    def write(self):
        try:
            for package in () if sys.dont_write_bytecode else self.grown:
                new = f"{self.path(package)}.{os.getpid()}"
                with open(new, "wb") as file:
                    marshal.dump(self.read(package) | self.known[package], file)
                os.replace(new, self.path(package))
        except OSError:
            return  # the next rank compiles them again: this one may be in a sandbox

    def path(self, package):
        return f"{self.FOLDER}/dataclasses-{package}-{self.MAGIC}"


class Dataclasses:
    """Loads the module dataclasses and gives it another exec()."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        spec = PathFinder.find_spec(module.__name__)
        _bootstrap._init_module_attrs(spec, module, override=True)
        spec.loader.exec_module(module)
        module.exec = Compiled().exec
        module.inspect = WithoutSignatures


class WithoutSignatures:
    """Is the module inspect for dataclasses without a docstring, which nobody reads."""

    def signature(_):
        raise ValueError


class Typings:
    """Loads the module typing, whose named tuples keep annotations as they are: texts.

    To compile each takes a rank 0.01 s.
    """

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        spec = PathFinder.find_spec(module.__name__)
        _bootstrap._init_module_attrs(spec, module, override=True)
        spec.loader.exec_module(module)
        module._make_nmtuple = named_tuple


def named_tuple(name, types, module, defaults=()):
    types = dict(types)
    new = collections.namedtuple(name, types, defaults=defaults, module=module)
    new.__annotations__ = new.__new__.__annotations__ = types
    return new


class After:
    """Loads the real one of another module first, which may import the module itself."""

    def __init__(self, other):
        self.other = other

    def create_module(self, spec):
        loaded(self.other)
        return importlib.import_module(spec.name)

    def exec_module(self, module):
        """Do nothing: it has run."""


def spec_of(name):
    parent = name.rpartition(".")[0]
    return PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)


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


def without_dtensors(spec):
    """Let torch.testing.assert_close() look for DTensors once their module is there."""
    load = spec.loader.exec_module

    @functools.wraps(load)
    def exec_module(module):
        load(module)
        unwrap = getattr(module, "_unwrap_dtensor_for_comparison", None)  # from torch 2.13 on
        if unwrap is not None:
            module._unwrap_dtensor_for_comparison = lambda actual, expected: (
                unwrap(actual, expected) if DTENSORS in sys.modules else (actual, expected)
            )

    spec.loader.exec_module = exec_module
    return spec


LATE = {
    COMPILER: Compiler,
    META: Meta,
    SHAPES: Shapes,
    "numpy.typing": Typing,
    "numpy._typing": Typing,
    **dict.fromkeys(PARTS, Part),
    **dict.fromkeys(PACKAGES, Package),
}
sys.meta_path.insert(0, Finder())
