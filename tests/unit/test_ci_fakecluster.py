"""What the fake cluster of ci/ says before it makes anything: why it cannot, what is no rate."""

import os
import shutil

import fakecluster
import pytest
from fakecluster import Cluster, ClusterError, burst_of, bytes_per_second, obstacle


def test_hosts_need_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert obstacle() == "namespaces need root"


def test_missing_tools_are_named_with_their_packages(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else tool)
    assert obstacle().startswith("no ip, tc here: apt install iproute2")


def test_a_refusal_of_the_kernel_is_passed_on(monkeypatch, tmp_path):
    for tool in fakecluster.TOOLS:
        (tmp_path / tool).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obstacle().startswith("namespaces are not permitted here: ip netns add ringcomm-trial-")
    assert obstacle().endswith(": Operation not permitted")


def test_no_trial_is_left(monkeypatch, tmp_path):
    for tool in fakecluster.TOOLS:
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$0" "$@" >>{tmp_path}/calls\n')
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obstacle() is None
    name = f"ringcomm-trial-{os.getpid()}"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].endswith(f"ip netns add {name}")
    assert calls[-1].endswith(f"ip netns del {name}")


@pytest.mark.parametrize("rate", ["200", "200mbps", "mbit", "-1mbit", ""])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ClusterError, match="is no rate"):
        burst_of(rate)


def test_a_burst_is_a_millisecond_or_some_packets():
    assert bytes_per_second("200mbit") == 25e6
    assert burst_of("1gbit") == 125_000
    assert burst_of("500kbit") == 16384


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 40])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(ClusterError, match="is no name"):
        Cluster(name)


def test_a_cluster_that_is_not_up_says_so():
    with pytest.raises(ClusterError, match="not-there is not up"):
        Cluster("not-there").boot("h0")
    Cluster("not-there").down()
