"""Makes an environment on top of the running python's and builds ringcomm into it, offline.

usage: python3 set_up.py SOURCES WHEELS WORK
Makes WORK/venv. The standard library alone is at hand here.
"""

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


def main():
    sources, wheels, work = map(Path, sys.argv[1:])
    python = make_environment(work / "venv")
    found = sorted(wheels.glob("*.whl"))
    if found:
        install(python, *found)
    if not any(wheel.name.startswith("ringcomm-") for wheel in found):
        build(python, sources, work / "build")
    run(python, "-P", "-c", LOOK)


def make_environment(folder):
    """Return the python of a new environment that sees what this one sees.

    Not --system-site-packages: if this is an environment itself, that shows the system's alone.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout
    outer = [path for path in sys.path if path.endswith("-packages")]
    lines = [LAYER.format(path) for path in outer]
    Path(own.strip(), "outer.pth").write_text("\n".join(lines) + "\n")
    return python


def build(python, sources, folder):
    # CMake would look for nanobind beside the environment's own packages alone.
    asked = [python, "-m", "nanobind", "--cmake_dir"]
    nanobind = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    settings = {"build-dir": folder, "cmake.define.nanobind_DIR": nanobind}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    install(python, "--no-build-isolation", *options, sources)


def install(python, *arguments):
    # --ignore-installed: what the outer environment has is another one's.
    always = ("--no-index", "--no-deps", "--no-compile", "--ignore-installed")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", *always, *arguments)


def run(*command):
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
