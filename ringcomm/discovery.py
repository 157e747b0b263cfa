"""Entry points by which torch finds the backend "ringcomm" without an import of ringcomm.

torch up to 2.13 calls register_quietly() in every process that imports torch. So it uses
torch's public names alone: no engine, no MPI, no numpy, no environment. The rest is imported when
a process group or an init_method of ringcomm is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def register() -> None:
    """Make the backend and mpi:// known to torch.distributed; again is nothing.

    The entry point "torch.distributed.backends", of torch 2.14 and newer.
    """
    from torch import distributed

    dist: Any = distributed  # its stubs leave names out
    if not dist.is_available() or hasattr(dist.Backend, "RINGCOMM"):
        return
    make = _later("entry", "make")
    dist.Backend.register_backend("ringcomm", make, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler("mpi", _later("rendezvous", "by_mpi"))


def register_quietly() -> None:
    """Do the same; an `import torch` must not fail for what it may not need.

    The entry point "torch.backends".
    """
    try:
        register()
    except Exception as error:  # noqa: BLE001 - of a torch that we do not know
        import logging

        logging.getLogger("ringcomm").warning(
            'torch.distributed does not know the backend "ringcomm" (%s: %s): `import '
            "ringcomm.torch` before init_process_group() says what is wrong",
            type(error).__name__,
            error,
        )


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of ringcomm.torch.distributed that is imported when it is called."""

    def call(*args: Any, **options: Any) -> Any:
        home = import_module(f"ringcomm.torch.distributed.{module}")
        return getattr(home, name)(*args, **options)

    return call
