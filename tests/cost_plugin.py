"""A plugin for pytest: what each test file costs, written down for ci/verdict.py.

A cost is CPU seconds of this process and of all that it has waited for, and a number of jobs.
"""

import json
import os
import resource
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

LAUNCHERS = {"mpirun", "mpiexec", "ringcomm"}


def pytest_configure(config):
    path = os.environ.pop("COSTS", None)  # what runs below this process is not of this step
    if path:
        config.pluginmanager.register(Costs(path))


class Costs:
    """Adds up the costs of each file, from the end of one test to the end of the next."""

    def __init__(self, path):
        self.path = path
        self.of_file = defaultdict(lambda: [0.0, 0])
        self.before, self.n_jobs = cpu_seconds(), 0
        self.popen = subprocess.Popen.__init__

        def start(process, *arguments, **options):
            self.n_jobs += is_job(arguments[0] if arguments else options["args"])
            self.popen(process, *arguments, **options)

        subprocess.Popen.__init__ = start

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self):
        self.add("(collection)")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid, location):
        self.add(location[0].removeprefix("../").rpartition("tests/")[2])

    def add(self, name):
        now = cpu_seconds()
        cost = self.of_file[name]
        cost[0] += now - self.before
        cost[1] += self.n_jobs
        self.before, self.n_jobs = now, 0

    def pytest_sessionfinish(self):
        subprocess.Popen.__init__ = self.popen
        self.add("(end)")
        Path(self.path).write_text(json.dumps(self.of_file))


def cpu_seconds():
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def is_job(command):
    """Return True for `mpirun ...` and `ringcomm run ...`, also behind `ip netns exec` or env."""
    if isinstance(command, str | os.PathLike):
        return False
    words = [os.path.basename(os.fspath(each)) for each in command]
    return any(
        word in LAUNCHERS and (word != "ringcomm" or words[i + 1 : i + 2] == ["run"])
        for i, word in enumerate(words)
    )
