"""What is missing of the GPU stack is told in a line: by tables, and by looking at stand-ins.

The stand-ins are a cupy of a few lines and shared libraries that are compiled here; the process
that looks at them sees nothing of what is really installed.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compile_c_library import compile_library

import ringcomm
from ringcomm.errors import ConfigError
from ringcomm.nvidia import find_software
from ringcomm.nvidia.judge_software import (
    Cupy,
    Driver,
    Gpu,
    Nccl,
    Stack,
    nccl_paths,
    problems,
    require,
    require_nccl,
)

GPU = Gpu("NVIDIA H200", "6b1e", 150_000_000_000, 90)
DRIVER = Driver(is_loaded=True, release="580.65.06", cuda=13000, gpus=(GPU,))
CUPY = Cupy(version="14.2.0", cuda=13020, nvrtc="13.0", has_headers=True)
NCCL = Nccl(version=22803, paths=("/v/libnccl.so.2",))
WHEELS = {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.28.3"}
WHEELS_12 = {"cupy-cuda12x": "14.2.0", "nvidia-nccl-cu12": "2.28.3"}
GOOD = Stack(driver=DRIVER, cupy=CUPY, nccl=NCCL, wheels=WHEELS)
INSTALL = "pip install 'ringcomm[cuda13]'"
INSTALL_12 = "pip install 'ringcomm[cuda12]'"


def driver(**changes):
    return replace(GOOD, driver=replace(DRIVER, **changes))


def no_start(code, name, **changes):
    return driver(init_code=code, init_error=name, gpus=(), **changes)


def cupy(wheels=WHEELS, **changes):
    return replace(GOOD, cupy=replace(CUPY, **changes), wheels=wheels)


def nccl(**changes):
    return replace(GOOD, nccl=replace(NCCL, **changes))


# --- the judgement ------------------------------------------------------------------------------
NO_CUPY = [
    (
        replace(GOOD, cupy=Cupy(), nccl=Nccl(), wheels={}),
        f"a GPU array needs cupy: {INSTALL}",
    ),
    (
        Stack(driver=replace(DRIVER, cuda=12040)),
        f"a GPU array needs cupy: {INSTALL_12}",
    ),
    (
        cupy(version="", error="ImportError: libcudart.so.13: cannot open shared object file"),
        "cupy cannot be imported (ImportError: libcudart.so.13: cannot open shared object file): "
        f"{INSTALL}",
    ),
    (  # pip would not touch the one of another name, and both own the same files
        cupy(version="", error="cupy 14.2.0 is built for ROCm", wheels={"cupy": "14.2.0"}),
        "cupy cannot be imported (cupy 14.2.0 is built for ROCm): "
        f"pip uninstall -y cupy && {INSTALL}",
    ),
    (
        cupy(version="13.6.0"),
        f"cupy 13.6.0 is too old, ringcomm needs 14.0 or later: {INSTALL}",
    ),
    (
        cupy(version="13.6.0", wheels={"cupy-cuda12x": "13.6.0"}),  # a newer driver serves it, too
        f"cupy 13.6.0 is too old, ringcomm needs 14.0 or later: {INSTALL_12}",
    ),
]
NO_GPU = [
    (
        replace(GOOD, driver=Driver()),
        "no NVIDIA driver (libcuda.so.1) is here: install one, or start the container with "
        "--gpus all",
    ),
    (
        replace(GOOD, driver=Driver(release="580.65.06")),
        "NVIDIA's kernel module 580.65.06 is here, but libcuda.so.1 is not: start the container "
        "with --gpus all",
    ),
    (
        replace(GOOD, driver=Driver(error="libcuda.so.1: file too short")),
        "NVIDIA's driver cannot be loaded (libcuda.so.1: file too short): reinstall it",
    ),
    (
        driver(gpus=()),
        "NVIDIA's driver for CUDA 13.0 finds no GPU: start the container with --gpus all",
    ),
    (
        no_start(100, "CUDA_ERROR_NO_DEVICE"),
        "NVIDIA's driver for CUDA 13.0 finds no GPU: start the container with --gpus all",
    ),
    (
        no_start(100, "CUDA_ERROR_NO_DEVICE", visible=""),
        "CUDA_VISIBLE_DEVICES='' leaves no GPU: unset CUDA_VISIBLE_DEVICES",
    ),
    (
        driver(gpus=(), visible="7"),
        "CUDA_VISIBLE_DEVICES='7' leaves no GPU: unset CUDA_VISIBLE_DEVICES",
    ),
    (
        no_start(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        "NVIDIA's driver does not start (cuInit: 803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, kernel "
        "module 580.65.06): libcuda.so.1 and the kernel module are of different releases: "
        "reboot, or load the module nvidia again",
    ),
    (
        no_start(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", release=""),
        "NVIDIA's driver does not start (cuInit: 804 CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE): "
        "libcuda.so.1 is of cuda-compat, which this GPU or its kernel module does not allow: "
        "take the folder compat out of LD_LIBRARY_PATH",
    ),
    (
        no_start(34, "CUDA_ERROR_STUB_LIBRARY", release="", cuda=0),
        "NVIDIA's driver does not start (cuInit: 34 CUDA_ERROR_STUB_LIBRARY): libcuda.so.1 is the "
        "stub that programs are linked with: take the folder stubs out of LD_LIBRARY_PATH",
    ),
    (
        no_start(4711, "", release=""),
        "NVIDIA's driver does not start (cuInit: 4711): see what nvidia-smi says",
    ),
    (
        driver(cuda=11080),
        "NVIDIA's driver serves CUDA 11.8, ringcomm needs 12 or later: "
        "install a driver of release 525 or later",
    ),
    (
        driver(cuda=12040),
        "NVIDIA's driver serves CUDA 12.4, cupy 14.2.0 needs CUDA 13: "
        f"pip uninstall -y cupy-cuda13x && {INSTALL_12}",
    ),
]
NO_KERNELS = [
    (cupy(nvrtc=""), f"cupy finds no NVRTC, with which it compiles kernels: {INSTALL}"),
    (cupy(has_headers=False), f"cupy finds no CUDA headers, which kernels need: {INSTALL}"),
]
NO_NCCL = [
    (nccl(version=0, paths=()), f"cupy finds no NCCL that it can use: {INSTALL}"),
    (
        nccl(version=0, error="/v/nccl.so: undefined symbol: ncclCommSplit"),
        "cupy finds no NCCL that it can use (/v/nccl.so: undefined symbol: ncclCommSplit): "
        f"{INSTALL}",
    ),
    (
        nccl(version=22003, paths=("/usr/lib/libnccl.so.2",)),
        "NCCL 2.20.3 (/usr/lib/libnccl.so.2) is too old, ringcomm needs 2.21.0 or later: "
        f"{INSTALL}",
    ),
    (
        nccl(paths=("/v/libnccl.so.2", "/usr/lib/libnccl.so.2.27.5")),
        "2 NCCL libraries are in one process, /v/libnccl.so.2 and /usr/lib/libnccl.so.2.27.5: "
        "keep one, or put the folder of torch's into LD_LIBRARY_PATH",
    ),
]
TWO_WHEELS = [
    (
        replace(GOOD, wheels=WHEELS | {"cupy-cuda12x": "14.2.0"}),
        "cupy-cuda13x and cupy-cuda12x are installed together and overwrite each other: "
        f"pip uninstall -y cupy-cuda13x cupy-cuda12x && {INSTALL}",
    ),
    (
        replace(GOOD, wheels=WHEELS | {"nvidia-nccl-cu12": "2.28.3"}),
        "nvidia-nccl-cu13 and nvidia-nccl-cu12 are installed together and overwrite each other: "
        f"pip uninstall -y nvidia-nccl-cu13 nvidia-nccl-cu12 && {INSTALL}",
    ),
]
UNFIT = NO_CUPY + NO_GPU + NO_KERNELS
GOOD_12 = replace(GOOD, cupy=replace(CUPY, cuda=12090, nvrtc="12.9"), wheels=WHEELS_12)
SOUND = [GOOD, GOOD_12, replace(GOOD_12, driver=replace(DRIVER, cuda=12040))]


@pytest.mark.parametrize(("stack", "line"), UNFIT + NO_NCCL + TWO_WHEELS)
def test_each_gap_is_one_line_that_says_what_to_do(stack, line):
    assert [str(problem) for problem in problems(stack)] == [line]


@pytest.mark.parametrize(("stack", "line"), UNFIT)
def test_an_array_on_a_gpu_is_refused_by_that_line(stack, line):
    with pytest.raises(ConfigError) as refused:
        require(stack)
    assert str(refused.value) == line


@pytest.mark.parametrize("stack", [stack for stack, _ in NO_NCCL + TWO_WHEELS] + SOUND)
def test_arrays_on_a_gpu_do_without_nccl(stack):
    require(stack)


@pytest.mark.parametrize("stack", SOUND)
def test_nothing_is_said_of_what_is_sound(stack):
    assert problems(stack) == []
    require_nccl(stack)


@pytest.mark.parametrize(("stack", "line"), NO_NCCL)
def test_why_there_is_no_nccl_can_be_asked_for_alone(stack, line):
    with pytest.raises(ConfigError) as refused:
        require_nccl(stack)
    assert str(refused.value) == line


def test_what_matters_most_is_told_first():
    stack = Stack(wheels=WHEELS | {"cupy-cuda12x": "14.2.0"}, cupy=Cupy(error="ImportError: x"))
    first, second, third = map(str, problems(stack))
    assert first == (
        "cupy cannot be imported (ImportError: x): "
        f"pip uninstall -y cupy-cuda13x cupy-cuda12x && {INSTALL}"
    )
    assert "no NVIDIA driver" in second
    assert "installed together" in third


ABSENT = [Stack(), Stack(driver=Driver(release="580.65.06")), Stack(nccl=NCCL)]
HALF_THERE = [
    Stack(cupy=CUPY),
    Stack(cupy=Cupy(error="ImportError: x")),
    Stack(wheels={"cupy-cuda12x": "14.2.0"}),
    Stack(driver=DRIVER),
    Stack(driver=Driver(error="libcuda.so.1: file too short")),
    GOOD,
]


@pytest.mark.parametrize("stack", ABSENT)
def test_where_nobody_wanted_a_gpu_none_is_missing(stack):
    assert stack.is_absent


@pytest.mark.parametrize("stack", HALF_THERE)
def test_half_a_stack_is_not_an_absent_one(stack):
    assert not stack.is_absent


@pytest.mark.parametrize("stack", [Stack(), GOOD, driver(visible="0")])
def test_a_stack_survives_the_way_to_another_process(stack):
    assert Stack.unpack(stack.pack()) == stack


# --- which NCCL ---------------------------------------------------------------------------------
MAPPED = """\
7f0000000000-7f0000001000 r--p 00000000 fd:00 123   /usr/lib/libc.so.6
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f1000000000-7f1000001000 r--p 00000000 fd:00 4711  /my env/nvidia/nccl/lib/libnccl.so.2
7f1000001000-7f1000002000 r-xp 00001000 fd:00 4711  /my env/nvidia/nccl/lib/libnccl.so.2
7f1000002000-7f1000003000 r--p 00000000 fd:00 4712  /usr/lib/libnccl-net.so
7f1000003000-7f1000004000 r--p 00000000 fd:00 4713  /usr/lib/libnccl-tuner.so.2
7f1000004000-7f1000005000 r--p 00000000 fd:00 4714  /v/cupy_backends/cuda/libs/nccl.cpython-311.so
"""
OTHERS = """\
7f2000000000-7f2000001000 r-xp 00000000 fd:00 4711  /elsewhere/libnccl.so.2
7f2000001000-7f2000002000 r-xp 00000000 fd:00 4720  /usr/lib/libnccl.so.2.27.5 (deleted)
7f2000002000-7f2000003000 r-xp 00000000 fd:01 4711  /opt/libnccl.so
"""
MAPS = [
    ("", ()),
    (MAPPED, ("/my env/nvidia/nccl/lib/libnccl.so.2",)),
    (
        MAPPED + OTHERS,  # the first of the others is a file that is mapped under two names
        ("/my env/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.27.5", "/opt/libnccl.so"),
    ),
]


@pytest.mark.parametrize(("maps", "paths"), MAPS)
def test_each_nccl_library_of_a_process_is_found_once(maps, paths):
    assert nccl_paths(maps) == paths


# --- looking at stand-ins -----------------------------------------------------------------------
LIBCUDA = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
int cuDriverGetVersion(int* version) { *version = number("FAKE_CUDA", 13000); return 0; }
int cuInit(unsigned flags) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible && !*visible ? 100 : number("FAKE_INIT", 0);
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code < 1000 ? "CUDA_ERROR_OF_SOME_KIND" : 0;
  return *name ? 0 : 1;
}
int cuDeviceGetCount(int* count) { *count = number("FAKE_GPUS", 2); return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
  strncpy(name, device ? "Other" : "Fake GPU", length);
  return 0;
}
#ifndef OLD
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, 16 + device, 16); return 0; }
#endif
int cuDeviceTotalMem_v2(size_t* nbytes, int device) { *nbytes = 80000000000; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 8 + device : attribute == 76 ? 6 : -1;
  return 0;
}
"""
NO_SUCH_FILE = "libnccl.so.2: cannot open shared object file: No such file or directory"
CUPY_FILES = {
    "cupy/__init__.py": "__version__ = '14.2.0'\nfrom cupy import cuda\n",
    "cupy/cuda/__init__.py": (
        "class runtime:\n"
        "    is_hip = False\n"
        "    runtimeGetVersion = lambda: 13020\n"
        "class nvrtc:\n"
        "    getVersion = lambda: (13, 0)\n"
    ),
    "cupy/cuda/nccl.py": "available = True\ndef get_version(): return 22803\n",
    "cuda/pathfinder.py": "def find_nvidia_header_directory(name): return '/include'\n",
    "cupy_cuda13x-14.2.0.dist-info/METADATA": "Name: cupy-cuda13x\nVersion: 14.2.0\n",
}
# As cupy 14.2 does: the module is there, and it warns, with an error where warnings are errors.
CUPY_WITHOUT_NCCL = {
    "cupy/cuda/nccl.py": "import warnings\navailable = False\nwarnings.warn('no NCCL')\n",
    "cupy_backends/cuda/libs/nccl.py": f"raise ImportError({NO_SUCH_FILE!r})\n",
}
BROKEN_CUPY = """
try:
    raise ImportError("libcublas.so.12: cannot open shared object file: No such file or directory")
except ImportError as exc:
    raise ImportError(f'''
=========
Failed to import CuPy. Much advice.
=========
''') from exc
"""
LOOK = """
import sys
from pathlib import Path
from ringcomm.nvidia import find_software
if sys.argv[1]:
    find_software._LIBRARY = sys.argv[1]
find_software._KERNEL_MODULE = Path("/nowhere")
print(find_software.probe().pack())
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """Return a folder with a driver that does as FAKE_INIT, FAKE_CUDA and FAKE_GPUS say."""
    return compile_library(LIBCUDA, tmp_path_factory.mktemp("driver") / "libcuda.so.1").parent


@pytest.fixture
def look(tmp_path):
    """Return a function that gives the Stack which a process finds that sees only stand-ins."""
    (tmp_path / "ringcomm").symlink_to(Path(ringcomm.__file__).parent)

    def look(files, drivers=None, library="", **variables):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        libraries = [drivers, os.environ.get("LD_LIBRARY_PATH")]
        environ = {
            "PYTHONPATH": str(tmp_path),
            "LD_LIBRARY_PATH": ":".join(str(each) for each in libraries if each),
            **variables,
        }
        # -S keeps out what is really installed.
        done = subprocess.run(
            [sys.executable, "-S", "-P", "-W", "error", "-c", LOOK, library],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
            env=environ,
        )
        return Stack.unpack(done.stdout)

    return look


def lines(stack):
    return [str(problem) for problem in problems(stack)]


ABSENT_DRIVER = "libabsent.so.1"  # is none, even on a machine that has one


def test_nothing_is_found_where_nothing_is(look):
    assert look({}, library=ABSENT_DRIVER) == Stack()


def test_a_whole_stack_is_found_to_be_one(look, libcuda):
    stack = look(CUPY_FILES, libcuda)
    assert stack == Stack(
        driver=Driver(
            is_loaded=True,
            cuda=13000,
            gpus=(
                Gpu("Fake GPU", "10101010-1010-1010-1010-101010101010", 80_000_000_000, 86),
                Gpu("Other", "11111111-1111-1111-1111-111111111111", 80_000_000_000, 96),
            ),
        ),
        cupy=CUPY,
        nccl=Nccl(version=22803),
        wheels={"cupy-cuda13x": "14.2.0"},
    )
    require(stack)
    assert lines(stack) == []


# Files that replace those of a whole cupy; how the line begins.
CUPIES = {
    "not installed": (
        {"cupy/__init__.py": "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')"},
        "a GPU array needs cupy: ",
    ),
    "half installed": (
        {"cupy/__init__.py": "import cupy_backends\n"},
        "cupy cannot be imported (ModuleNotFoundError: No module named 'cupy_backends'): ",
    ),
    "for another CUDA": (
        {"cupy/__init__.py": BROKEN_CUPY},
        "cupy cannot be imported (ImportError: libcublas.so.12: cannot open shared object file: "
        "No such file or directory): ",
    ),
    "an empty folder": (
        {"cupy/__init__.py": ""},
        "cupy cannot be imported (AttributeError: module 'cupy' has no attribute 'cuda'): ",
    ),
    "for ROCm": (
        {"cupy/cuda/__init__.py": "class runtime: is_hip = True\n"},
        "cupy cannot be imported (cupy 14.2.0 is built for ROCm): ",
    ),
    "too old": (
        {"cupy/__init__.py": "__version__ = '13.6.0'\nfrom cupy import cuda\n"},
        "cupy 13.6.0 is too old, ringcomm needs 14.0 or later: ",
    ),
    "twice": (
        {"cupy_cuda12x-14.2.0.dist-info/METADATA": "Name: cupy-cuda12x\nVersion: 14.2.0\n"},
        "cupy-cuda13x and cupy-cuda12x are installed together and overwrite each other: ",
    ),
    "warning": (
        {"cupy/__init__.py": "import warnings; warnings.warn('x')\n" + BROKEN_CUPY},
        "cupy cannot be imported (ImportError: libcublas",
    ),
    "without NVRTC": (
        {
            "cupy/cuda/__init__.py": CUPY_FILES["cupy/cuda/__init__.py"]
            + "def fail(): raise RuntimeError('CuPy failed to load libnvrtc.so.13')\n"
            + "nvrtc.getVersion = fail\n"
        },
        "cupy finds no NVRTC, with which it compiles kernels: ",
    ),
    "without headers": (
        {"cuda/pathfinder.py": "def find_nvidia_header_directory(name): return None\n"},
        "cupy finds no CUDA headers, which kernels need: ",
    ),
    "without NCCL": (
        CUPY_WITHOUT_NCCL,
        f"cupy finds no NCCL that it can use: {INSTALL}",
    ),
    "with an NCCL that lacks what it needs": (
        CUPY_WITHOUT_NCCL
        | {
            "cupy_backends/cuda/libs/nccl.py": (
                "raise ImportError('/v/nccl.so: undefined symbol: ncclCommSplit')\n"
            )
        },
        "cupy finds no NCCL that it can use (/v/nccl.so: undefined symbol: ncclCommSplit): ",
    ),
    "with an old NCCL": (
        {"cupy/cuda/nccl.py": "available = True\ndef get_version(): return 21801\n"},
        "NCCL 2.18.1 is too old, ringcomm needs 2.21.0 or later: ",
    ),
    "with an NCCL that fails": (
        {
            "cupy/cuda/nccl.py": (
                "available = True\ndef get_version(): raise RuntimeError('NCCL_ERROR_SYSTEM')\n"
            )
        },
        "cupy finds no NCCL that it can use (NCCL_ERROR_SYSTEM): ",
    ),
}


@pytest.mark.parametrize(("files", "line"), CUPIES.values(), ids=CUPIES)
def test_a_cupy_that_lacks_something_is_one_line(files, line, look, libcuda):
    (found,) = lines(look(CUPY_FILES | files, libcuda))
    assert found.startswith(line)
    assert INSTALL in found


MISMATCH = "(cuInit: 803 CUDA_ERROR_OF_SOME_KIND): libcuda.so.1 and the kernel module are of diff"
DRIVERS = {
    "without a GPU": ({"FAKE_GPUS": "0"}, "NVIDIA's driver for CUDA 13.0 finds no GPU: "),
    "no device": ({"FAKE_INIT": "100"}, "NVIDIA's driver for CUDA 13.0 finds no GPU: "),
    "hidden": ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' leaves no GPU: unset "),
    "mismatch": ({"FAKE_INIT": "803"}, f"NVIDIA's driver does not start {MISMATCH}"),
    "compat": ({"FAKE_INIT": "804"}, "NVIDIA's driver does not start (cuInit: 804 "),
    "unheard of": ({"FAKE_INIT": "4711"}, "NVIDIA's driver does not start (cuInit: 4711): see "),
    "for CUDA 11": ({"FAKE_CUDA": "11080"}, "NVIDIA's driver serves CUDA 11.8, ringcomm needs 12"),
    "for CUDA 12": ({"FAKE_CUDA": "12040"}, "NVIDIA's driver serves CUDA 12.4, cupy 14.2.0 needs"),
}


@pytest.mark.parametrize(("variables", "line"), DRIVERS.values(), ids=DRIVERS)
def test_a_driver_that_gives_no_gpu_is_one_line(variables, line, look, libcuda):
    stack = look(CUPY_FILES, libcuda, **variables)
    (found,) = lines(stack)
    assert found.startswith(line)


def test_cupy_without_a_driver_is_one_line(look):
    (found,) = lines(look(CUPY_FILES, library=ABSENT_DRIVER))
    line = "no NVIDIA driver (libcuda.so.1) is here: install one, or start the container with"
    assert found == f"{line} --gpus all"


def test_a_driver_that_cannot_be_loaded_is_told_from_none(look, tmp_path):
    (tmp_path / "libcuda.so.1").write_text("")
    (found,) = lines(look(CUPY_FILES, tmp_path))
    assert found.startswith("NVIDIA's driver cannot be loaded (")
    assert "file too short" in found


def test_a_driver_that_lacks_a_function_is_told(look, tmp_path):
    compile_library(LIBCUDA, tmp_path / "libcuda.so.1", "-DOLD")
    (found,) = lines(look(CUPY_FILES, tmp_path))
    assert "undefined symbol: cuDeviceGetUuid_v2" in found


def test_two_nccl_in_one_process_are_named(look, libcuda, tmp_path):
    paths = [compile_library("int ncclOf;", tmp_path / folder / "libnccl.so.2") for folder in "ab"]
    loads = "".join(f"ctypes.CDLL({str(path)!r})\n" for path in paths)
    source = f"import ctypes\n{loads}{CUPY_FILES['cupy/cuda/nccl.py']}"
    stack = look(CUPY_FILES | {"cupy/cuda/nccl.py": source}, libcuda)
    assert sorted(stack.nccl.paths) == [str(path.resolve()) for path in paths]
    with pytest.raises(ConfigError, match="2 NCCL libraries are in one process") as refused:
        require_nccl(stack)
    assert all(path in str(refused.value) for path in stack.nccl.paths)


RELEASES = [
    (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        "GCC version:  gcc version 11.4.0\n",
        "535.104.05",
    ),
    (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
        "580.65.06",
    ),
    ("something else", ""),
]


@pytest.mark.parametrize(("text", "release"), RELEASES)
def test_the_release_of_either_kernel_module_is_read(text, release, tmp_path, monkeypatch):
    monkeypatch.setattr(find_software, "_KERNEL_MODULE", tmp_path / "version")
    assert find_software._release() == ""
    (tmp_path / "version").write_text(text)
    assert find_software._release() == release
