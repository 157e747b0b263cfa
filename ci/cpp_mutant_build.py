"""Builds the compiled module and the stress programs from a copy of csrc/, one change at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CONFIGURE_LIMIT_S, BUILD_LIMIT_S = 120, 1800
MODULE = ("_core", "ringcomm-guardian")  # what belongs into the package
SOURCES = ("CMakeLists.txt", "pyproject.toml")


class CppBuild:
    """A copy of a checkout's C++ and what is built of it; a change recompiles what it reaches.

    Args:
        folder: where the copy and the build are made.
        root: the checkout.
        python: the interpreter for which the module is built; cmake and ninja stand beside it.
    """

    def __init__(self, folder: Path, root: Path, python: Path) -> None:
        self.sources, self._build = folder / "sources", folder / "build"
        self._tools = python.parent
        # What was compiled in another folder serves here, too, if there is a ccache.
        self._environment = {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}
        self.sources.mkdir()
        shutil.copytree(root / "csrc", self.sources / "csrc")
        for name in SOURCES:
            shutil.copy2(root / name, self.sources)
        self._configure(python)
        self.make(MODULE)

    def _configure(self, python: Path) -> None:
        nanobind = self._run(CONFIGURE_LIMIT_S, python, "-m", "nanobind", "--cmake_dir").strip()
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": self._tools / "ninja",
            "Python_EXECUTABLE": python,
            "nanobind_DIR": nanobind,
        }
        if ccache := shutil.which("ccache"):
            options["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
        defined = [f"-D{name}={value}" for name, value in options.items()]
        places = ["-S", self.sources, "-B", self._build, "-G", "Ninja"]
        self._run(CONFIGURE_LIMIT_S, self._tools / "cmake", *places, *defined)

    def make(self, targets: Iterable[str]) -> None:
        """Bring targets up to date with the sources.

        Raises:
            RuntimeError: they do not compile; with what the compiler says.
        """
        self._run(BUILD_LIMIT_S, self._tools / "ninja", "-C", self._build, *targets)

    def stress_program(self, name: str) -> Path:
        """Return the path of a program of csrc/stress, up to date."""
        self.make([f"stress_{name}"])
        return self._build / f"stress_{name}"

    def compiled(self) -> list[Path]:
        """Return what belongs into the package."""
        return [*self._build.glob("_core*.so"), self._build / "ringcomm-guardian"]

    @contextlib.contextmanager
    def changed(self, path: Path, text: str) -> Iterator[None]:
        """Build with another text of one file; what it was comes back at the end."""
        before = path.read_text()
        path.write_text(text)
        try:
            self.make(MODULE)
            yield
        finally:
            path.write_text(before)

    def _run(self, limit_s: float, *command: object) -> str:
        words = [str(word) for word in command]
        environment = os.environ | self._environment
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, check=False, env=environment
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
        return done.stdout
