"""The probes of ci/gpu_suite.sh, with a stand-in for NVIDIA's driver."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from gpu_suite import outcome_table
from harness import at_length

ROOT = Path(__file__).parents[2]


@functools.cache
def driver():
    """Return the folder of the stand-in, which the first caller builds."""
    folder = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    source, built = ROOT / "tests" / "fake_libcuda_for_driver_probes.cpp", folder / "libcuda.so.1"
    options = ("-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror")
    subprocess.run(["g++", *options, "-o", built, source], check=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _removed():
    yield
    if driver.cache_info().currsize:
        shutil.rmtree(driver())


def run(tmp_path, what, **environment):
    paths = os.pathsep.join(map(str, (ROOT / "ci", ROOT / "tests")))
    known = {"LD_LIBRARY_PATH": str(driver()), "FAKE_GPU": str(tmp_path), "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-P", *what],
        env=os.environ | known | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def probe(tmp_path, name, **environment):
    return run(tmp_path, ("-m", "gpu_suite.driver_probes", name), **environment)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memory", "a wait and a write take "),
        ("release", "done "),
        ("blocked", "0 of 18 calls block while a stream waits"),
        *at_length([("ipc,2", "maps in ")], []),
        ("ipc,4", "maps in "),
    ],
)
def test_a_probe_ends_with_its_figure(name, said, tmp_path):
    done = probe(tmp_path, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"figure: {said}")


MEET = """
import ctypes, time
import numpy as np
from ringcomm.gpu.device.driver import CudaDriver

driver, size = CudaDriver(), 600
stream = ctypes.c_void_p()
assert driver._cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
flags = np.zeros(size, np.uint32)
own, *others = (flags.ctypes.data + 4 * k for k in range(size))
assert driver.can_write_values(stream.value, own)
for value in (7, 8):
    driver.write_and_await(stream.value, own, tuple(others), value, flushes=False)
end = time.monotonic() + 30
for late in (1, 255, 256, size - 1):  # in each of the three calls
    flags[late] = 6  # first: at no moment may all be there
    flags[1:late] = flags[late + 1 :] = 7
    while flags[0] != 7 and time.monotonic() < end:
        pass
    assert flags[0] == 7, flags[0]
    time.sleep(0.05)  # a stream that missed the late flag would write 8 by now
    assert flags[0] == 7, late
flags[1:] = 2**31
while flags[0] != 8 and time.monotonic() < end:
    pass
print(flags[0])
"""


def test_a_meeting_of_streams_is_one_call_of_cuda(tmp_path):
    """The driver's own layout of the operations, for more ranks than one call takes."""
    done = run(tmp_path, ("-c", MEET))
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


LAUNCH = """
import ctypes, time
import numpy as np
from ringcomm.gpu.device.driver import CudaDriver
from ringcomm.gpu.kernels.base import BLOCK
from ringcomm.gpu.kernels.write_number import WriteKernel

driver, stream = CudaDriver(), ctypes.c_void_p()
assert driver._cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
function = driver.load_function(b"rc_entry", "rc_entry")
words = np.zeros(4, np.uint32)
for k in range(4):
    kernel = WriteKernel(words.ctypes.data + 4 * k, 70 + k)
    driver.launch(function, kernel.grid(132), BLOCK, kernel.parameters.extra, stream.value)
end = time.monotonic() + 30
while words[3] != 73 and time.monotonic() < end:
    pass
print(words)
try:
    driver.load_function(b"rc_entry", "another")
except Exception as error:
    print(error)
"""


def test_a_kernel_finds_its_parameters_in_one_buffer(tmp_path):
    done = run(tmp_path, ("-c", LAUNCH))
    assert (done.returncode, done.stderr) == (0, "")
    values, refused = done.stdout.splitlines()
    assert values == "[70 71 72 73]"
    assert refused.startswith("cuModuleGetFunction failed with CUDA_ERROR_OF_A_FAKE")


def test_a_call_that_blocks_is_named_and_hides_no_other(tmp_path):
    done = probe(tmp_path, "blocked", FAKE_BLOCKS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *details, figure = done.stdout.splitlines()
    assert figure == "figure: 1 of 18 calls block while a stream waits"
    (blocked,) = (line for line in details if "blocks until the stream goes on" in line)
    assert blocked.split()[1] == "free"


def test_a_machine_without_the_daemon_of_mps_says_so(tmp_path):
    done = probe(tmp_path, "ipc,2,mps", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (77, "skip: there is no nvidia-cuda-mps-control\n")


def test_a_private_daemon_of_mps_is_told_to_quit(tmp_path):
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $* $(cat)" >>{log}\n')
    program.chmod(0o755)
    done = probe(tmp_path, "ipc,2,mps", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    begun, ended = log.read_text().splitlines()
    folder, *_ = begun.split()
    assert folder.startswith("/tmp/mps-")
    assert ended.split() == [folder, "quit"]
    assert not Path(folder).exists()


def test_the_suite_asks_the_driver_itself_for_a_gpu(tmp_path):
    from gpu_suite.__main__ import PROBE

    done = run(tmp_path, ("-c", PROBE))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_matrix_shows_each_cell_and_the_first_error_of_each():
    cases = outcome_table.Matrix()
    for row, column, error in [("f32", "SUM", ""), ("f32", "SUM", "off"), ("i8", "MAX", "")]:
        cases.add(row, column, error)
    assert (cases.n_cases, cases.n_wrong) == (3, 1)
    assert [line.split() for line in cases.lines()] == [
        ["SUM", "MAX"],
        ["f32", "1/2!", "-"],
        ["i8", "-", "1"],
        ["f32,", "SUM:", "off"],
    ]
