"""Every kernel compiles for every GPU that is promised, and keeps its numbers in registers."""

import ctypes
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, files

import pytest
from gpu_kernel_variants import all_variants, reduction, representative_variants
from harness import at_length

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import SUM
from ringcomm.gpu.kernels.base import ENTRY, OPTIONS, source

PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")  # CUDA 13, CUDA 12
NAME = re.compile(r"libnvrtc\.so\.\d+")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@cache
def nvrtc():
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            (library,) = (f for f in files(package) or () if NAME.fullmatch(f.name))
            return ctypes.CDLL(str(library.locate()))
    pytest.skip(f"no NVRTC here: pip install {PACKAGES[0]}")


def text_of(program, what):
    """Return the program's log, cubin or PTX."""
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@cache
def compiled(text, architecture, defines):
    """Return the log, the cubin and the PTX. Fails with the log if there are none."""
    library, program = nvrtc(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *OPTIONS, *defines]
    raw = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = text.encode()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), code, b"kernels.cu", 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), raw)
        log = text_of(program, "ProgramLog").rstrip(b"\0").decode()
        assert not failed, log
        return log, text_of(program, "CUBIN"), text_of(program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def require_registers_alone(log):
    """Fail unless the log tells of one kernel, all of whose numbers are in registers."""
    frames = FRAME.findall(log)
    assert frames == [("0", "0", "0")], log
    assert "warning" not in log, log


def name_of(part):
    if isinstance(part, str):
        return part
    return "-".join(define.partition("=")[2] for define in part.defines)


EVERYWHERE = [
    (k, architecture) for k in representative_variants() for architecture in ARCHITECTURES
]
# The others take minutes on all architectures: each is compiled for one, in turns.
OTHERS = [(k, ARCHITECTURES[i % 4]) for i, k in enumerate(all_variants())]
IN_TURNS = [(k, ARCHITECTURES[i % 4]) for i, k in enumerate(representative_variants())]


@pytest.mark.parametrize(
    ("kernel", "architecture"), at_length(EVERYWHERE + OTHERS, IN_TURNS), ids=name_of
)
def test_kernels_need_registers_alone(kernel, architecture):
    log, cubin, _ = compiled(source(), architecture, kernel.defines)
    require_registers_alone(log)
    assert ENTRY.encode() in cubin


GREEDY = """
float many[999];
for (u64 k = 0; k < count; ++k) many[k * k % 999] = divisor;
static_cast<float*>(targets.at[0])[count] = many[divisor];
"""


def test_a_kernel_that_needs_more_than_registers_is_seen():
    kernel = reduction(DTYPES["float32"], SUM, 2)
    begin = "  using T = RC_TYPE;\n"
    assert begin in source()
    log, *_ = compiled(source().replace(begin, begin + GREEDY), "sm_90", kernel.defines)
    with pytest.raises(AssertionError, match="bytes stack frame"):
        require_registers_alone(log)


ARITHMETIC = re.compile(r"\b(?:add|sub|mul|mad|fma|div|sqrt|rcp)\.[a-z0-9.]*f(?:32|64)\b")
ROUNDED = re.compile(r"[a-z]+\.rn\.f(?:32|64)")


@pytest.mark.parametrize(("kernel", "architecture"), IN_TURNS, ids=name_of)
def test_arithmetic_is_that_of_ieee_754(kernel, architecture):
    """Nothing flushes or approximates, and no product is fused with a sum."""
    *_, ptx = compiled(source(), architecture, kernel.defines)
    done = set(ARITHMETIC.findall(ptx.decode()))
    assert done == {name for name in done if ROUNDED.fullmatch(name)}
    assert not any(name.startswith("fma") for name in done)


def test_what_does_not_compile_is_told():
    with pytest.raises(AssertionError, match=r"identifier .* is undefined"):
        compiled("no_such_type x;", "sm_90", ())


def test_the_source_includes_nothing():
    assert "#include" not in re.sub(r"//.*", "", source())
