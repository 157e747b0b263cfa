"""What pip calls to build: scikit-build-core, with zig's compiler where there is none of C++.

zig comes from pip, too. CXX, if it is set, is used as it is. Python's headers must be there.
"""

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from scikit_build_core import build as skbuild
from scikit_build_core.build import (  # noqa: F401 - pip looks for them here
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)


def needs_zig() -> bool:
    return not os.environ.get("CXX") and not any(map(shutil.which, ("c++", "g++", "clang++")))


def get_requires_for_build_wheel(config_settings=None):
    require_headers()
    return skbuild.get_requires_for_build_wheel(config_settings) + ["ziglang"] * needs_zig()


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    prepare()
    return skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    prepare()
    return skbuild.build_editable(wheel_directory, config_settings, metadata_directory)


def require_headers() -> None:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        sys.exit(
            f"ringcomm: Python's headers are missing ({header}): install a wheel of ringcomm, "
            f"which needs none, or python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        )


def prepare() -> None:
    require_headers()
    if needs_zig():
        import ziglang

        zig = Path(ziglang.__file__).with_name("zig")
        libc = "gnu.2.28" if platform.libc_ver()[0] == "glibc" else "musl"
        target = f"{platform.machine()}-linux-{libc}"  # else: this processor alone
        os.environ.update(zig_environment(zig, Path("build/zig").absolute(), target))


def zig_environment(zig: Path, folder: Path, target: str) -> dict[str, str]:
    """Return the variables for CMake, and write what they name into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cc", "c++", "ar", "ranlib"):
        tool = folder / name
        options = f"-target {target}" if name.startswith("c") else ""
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(str(zig))} {name} {options} "$@"\n')
        tool.chmod(0o755)
    archivers = f"-DCMAKE_AR={folder}/ar -DCMAKE_RANLIB={folder}/ranlib"
    given = os.environ.get("CMAKE_ARGS", "")
    return {
        "ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", f"{folder}/cache"),
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "CMAKE_ARGS": f"{given} {archivers}".strip(),
    }
