"""Cores that a job may use: what its ranks are bound to, and what its cgroup grants."""

import pytest

from ringcomm.launch.usable_cores import usable_cores


def test_each_rank_bound_to_a_core_of_its_own_makes_as_many_cores(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "900000 100000\n"})
    assert usable_cores([{0}, {1}, {1, 5}], tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
    ids=["a limit", "a limit above", "cgroups of version 1"],
)
def test_a_cgroup_grants_less_than_the_cpus_that_are_there(files, cores, tmp_path):
    write(tmp_path, files)
    assert usable_cores([range(16)], tmp_path) == cores


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
