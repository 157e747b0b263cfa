"""Entry points by which torch finds the backend "ringcomm" in programs that do not import it.

torch up to 2.13 calls register_quietly() in every process that imports torch. So this module uses
public names of torch only: no engine, no MPI, no numpy, no environment. Other modules are imported
when a process group or an init_method of ringcomm is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def register() -> None:
    """Register the backend and mpi:// with torch.distributed. A second call does nothing.

    torch 2.14 and newer calls this, by the entry point "torch.distributed.backends".
    """
    from torch import distributed

    dist: Any = distributed  # torch's stubs lack some names
    if not dist.is_available() or hasattr(dist.Backend, "RINGCOMM"):
        return
    make = _later("entry", "make")
    dist.Backend.register_backend("ringcomm", make, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler("mpi", _later("rendezvous", "by_mpi"))


def register_quietly() -> None:
    """Call register(), and log its errors: `import torch` must not fail because of ringcomm.

    torch up to 2.13 calls this, by the entry point "torch.backends".
    """
    try:
        register()
    except Exception as error:  # noqa: BLE001 - of an unknown version of torch
        import logging

        logging.getLogger("ringcomm").warning(
            'torch.distributed does not know the backend "ringcomm" (%s: %s). For the '
            "reason, `import ringcomm.torch` before init_process_group()",
            type(error).__name__,
            error,
        )


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        home = import_module(f"ringcomm.torch.distributed.{module}")
        return getattr(home, name)(*args, **options)

    return call
