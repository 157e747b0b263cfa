"""Several hosts on one Linux machine: network namespaces on one switch, behind links of one rate.

A host has its own host name, eth0, /etc/hosts and /dev/shm, and System V memory of its own. Hosts
share the file system, as over NFS, the kernel, and process ids: a launch agent must get from
inside one host into another, which the kernel refuses between sibling pid namespaces.

The name of a cluster is in the name of each of its network namespaces (`ip netns`), so that what is
left of one can be found and removed whatever has become of its files.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN = Path("/run/ringcomm-cluster")
NETNS = Path("/run/netns")
COMMAND = Path(__file__).with_name("cluster")
SLOTS = 8
QUEUE_MS = 4
TOOLS = ("ip", "tc", "nsenter", "unshare", "setsid", "mount", "hostname")
_KILL_S = 10.0

# Runs in the new network namespace and holds the others.
_HOLDER = """
set -e
hostname "$1"
mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
mount --bind "$2" /etc/hosts
echo $$
exec sleep infinity </dev/null >/dev/null 2>&1
"""
# All that a cluster needs, in namespaces that go with the shell.
_TRIAL = """
set -e
ip link add br0 type bridge
ip link add p0 type veth peer name eth0
ip link set p0 master br0
tc qdisc add dev eth0 root tbf rate 200mbit burst 25000 latency 4ms
hostname trial
mount -t tmpfs tmpfs /dev/shm
"""


class ClusterError(Exception):
    """Raised with what cannot be done, and why."""


def obstacle():
    """Return why this machine cannot hold a cluster, or None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt install iproute2 util-linux mount hostname"
    name = f"ringcomm-trial-{os.getpid()}"
    trial = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", _TRIAL]
    try:
        run("ip", "netns", "add", name)
        run(*trial)
    except ClusterError as error:
        return f"namespaces are not permitted here: {error}"
    finally:
        run("ip", "netns", "del", name, check=False)
    return None


@contextlib.contextmanager
def running(name, n, rate):
    """Yield a cluster that is taken down when the block, or this process, ends in whatever way."""
    cluster = Cluster(name)
    cluster.up(n, rate)
    undertaker = subprocess.Popen(
        [sys.executable, COMMAND, "--name", name, "down", "--at-eof"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )
    try:
        yield cluster
    finally:
        undertaker.stdin.close()
        code = undertaker.wait()
    if code != 0:
        raise ClusterError(f"cluster {name} could not be taken down (exit {code})")


class Cluster:
    """The hosts h0, h1, ... of the cluster of this name, up or not.

    Host hI is 10.77.0.(10 + I). Two clusters may use the same addresses: they have no link.
    """

    def __init__(self, name):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,30}", name):
            raise ClusterError(f"{name!r} is no name for a cluster: letters, digits, _ . -")
        self.name = name
        self.folder = RUN / name

    # --- its life ---------------------------------------------------------------------------------
    def up(self, n, rate):
        """Make n hosts; what was made is removed again if that fails.

        Raises:
            ClusterError: it is up already, or the kernel refused; the text says what.
        """
        if not 1 <= n <= 100:
            raise ClusterError(f"{n} hosts: between 1 and 100")
        burst_of(rate)
        self.refuse_if_up()
        RUN.mkdir(exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise ClusterError(f"cluster {self.name} is being made by another process") from None
        try:
            self._write_files([f"h{i}" for i in range(n)], rate)
            run("ip", "netns", "add", self._netns("switch"))
            self._in("switch", "ip", "link", "add", "br0", "type", "bridge")
            self._in("switch", "ip", "link", "set", "br0", "up")
            for host in self.hosts:
                self.boot(host)
        except BaseException:
            self.down()
            raise

    def down(self):
        """Remove all of it, also what a failed up() has left. No effect if there is nothing.

        Raises:
            ClusterError: a process does not die.
        """
        for member in self._members():
            self._end_processes(member)
            run("ip", "netns", "del", self._netns(member), check=False)
        if left := self._members():
            raise ClusterError(f"cluster {self.name}: {', '.join(left)} cannot be removed")
        shutil.rmtree(self.folder, ignore_errors=True)

    def refuse_if_up(self):
        """Raise ClusterError if there is anything of this name."""
        if self.folder.exists() or self._members():
            raise ClusterError(
                f"cluster {self.name} is up already: `ci/cluster --name {self.name} down`, "
                "or take another --name"
            )

    @property
    def hosts(self):
        """The names of its hosts, dead ones too."""
        return [line.split()[0] for line in self._read("hostfile").splitlines()]

    def boot(self, host):
        """Start a host, or a fresh one in place of a dead one."""
        self._check(host)
        if self._holder(host) is not None:
            raise ClusterError(f"{host} is up already")
        self._remove(host)
        run("ip", "netns", "add", self._netns(host))
        self._plug_in(host)
        self._hold(host)

    # --- what runs there --------------------------------------------------------------------------
    def entering(self, host, folder=None):
        """Return the command line that runs what is appended to it in `host`, in this folder.

        Raises:
            ClusterError: the host is dead.
        """
        self._check(host)
        holder = self._holder(host)
        if holder is None:
            raise ClusterError(f"{host}: no route to host")
        enter = ["nsenter", "-t", str(holder), "--net", "--uts", "--ipc", "--mount", "--"]
        return [
            *enter,
            "/bin/sh",
            "-c",
            'cd "$0" 2>/dev/null; exec "$@"',
            str(folder or os.getcwd()),
        ]

    def launch_options(self, *, is_mpich):
        """Return the options that let mpirun, inside one of the hosts, start ranks on all."""
        agent = self.folder / "ssh"
        if is_mpich:
            hosts = ",".join(self.hosts)
            return ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", hosts, "-iface", "eth0"]
        files = ["--hostfile", self.folder / "hostfile", "--prtemca", "plm_ssh_agent", agent]
        interface = ["--prtemca", "prte_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
        # Each host sees all cores of this machine: if ranks were bound, the first ones of all hosts
        # would share the first core. This is the default of --bind-to, which mpirun takes but once.
        return [*files, *interface, "--prtemca", "hwloc_default_binding_policy", "none"]

    def is_up(self, host):
        """Return False for one that has crashed or was killed."""
        return self._holder(host) is not None

    def has_crashed(self, host):
        """Return True for one that lost its power, also from inside another host."""
        self._check(host)
        return not self._pid_file(host).exists()

    def pids(self, host):
        """Return the processes of a host, but for the one that holds its namespaces."""
        self._check(host)
        return [pid for pid in self._pids(host) if pid != self._holder(host)]

    def shm(self, host):
        """Return /dev/shm of a live host, as a folder that can be read from outside."""
        return Path("/proc", str(self._holder(host)), "root/dev/shm")

    # --- what can befall a host -------------------------------------------------------------------
    def set_rate(self, host, rate):
        """Set the rate of one link, both ways ("50mbit"; "none" is no limit), until it boots."""
        self._check(host)
        ends = [("switch", f"p{host}"), (host, "eth0")]
        for member, device in ends:
            queue = ["tc", "qdisc", "replace", "dev", device, "root"]
            if rate == "none":
                self._in(member, *queue, "noqueue")
            else:
                shape = ["tbf", "rate", rate, "burst", burst_of(rate), "latency", f"{QUEUE_MS}ms"]
                self._in(member, *queue, *shape)

    def link(self, host, state):
        """Plug ("up") or pull ("down") the cable of a host; a pulled one loses in silence."""
        self._check(host)
        self._in("switch", "ip", "link", "set", f"p{host}", state)

    def crash(self, host):
        """Cut the power: the others hear nothing, no FIN, no RST."""
        self.link(host, "down")
        self._pid_file(host).unlink(missing_ok=True)  # before its end is seen: see has_crashed()
        self._remove(host)

    def kill(self, host):
        """Kill every process of a host; the others' connections are closed by its kernel."""
        self._check(host)
        self._end_processes(host)

    def freeze(self, host):
        """Stop every process of a host: connections stay open and nobody answers."""
        while running := [pid for pid in self.pids(host) if state_of(pid) not in ("T", "Z", "")]:
            self._signal(host, running, signal.SIGSTOP)
            time.sleep(0.001)  # a stop takes effect when the process is next scheduled

    def thaw(self, host):
        """Resume them."""
        self._signal(host, self.pids(host), signal.SIGCONT)

    def cut(self, one, other):
        """Lose all packets between two hosts, which both still reach the others."""
        for here, there in ((one, other), (other, one)):
            nowhere = ["lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", "eth0"]
            self._in(here, "ip", "neigh", "replace", self.address(there), *nowhere)

    def heal(self, one, other):
        """End what cut() began."""
        for here, there in ((one, other), (other, one)):
            self._in(here, "ip", "neigh", "del", self.address(there), "dev", "eth0")

    def address(self, host):
        """Return the IP address of a host."""
        self._check(host)
        return f"10.77.0.{10 + index_of(host)}"

    @property
    def rate(self):
        """The rate its links were made with."""
        return self._read("rate").strip()

    # --- privately --------------------------------------------------------------------------------
    def _write_files(self, hosts, rate):
        (self.folder / "hostfile").write_text("".join(f"{h} slots={SLOTS}\n" for h in hosts))
        (self.folder / "rate").write_text(f"{rate}\n")
        addresses = [f"{self.address(host)} {host}\n" for host in hosts]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses))
        agent = self.folder / "ssh"  # for MPICH this must be one word
        call = shlex.join([sys.executable, str(COMMAND), "--name", self.name, "ssh"])
        agent.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        agent.chmod(0o755)

    def _read(self, name):
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            raise ClusterError(f"cluster {self.name} is not up: ci/cluster up") from None

    def _check(self, host):
        if host not in self.hosts:
            raise ClusterError(f"there is no {host!r} among {', '.join(self.hosts)}")

    def _plug_in(self, host):
        """Connect eth0 to the switch; the same address in each life, so that nobody need ask."""
        port, hardware = f"p{host}", f"02:00:00:00:01:{10 + index_of(host):02x}"
        plug = ["ip", "link", "add", port, "netns", self._netns("switch"), "type", "veth", "peer"]
        run(*plug, "name", "eth0", "address", hardware, "netns", self._netns(host))
        self._in("switch", "ip", "link", "set", port, "master", "br0", "up")
        self._in(host, "ip", "link", "set", "lo", "up")
        self._in(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._in(host, "ip", "link", "set", "eth0", "up")
        self.set_rate(host, self.rate)

    def _hold(self, host):
        """Start the process that holds the other namespaces, and note it with its network's."""
        enter = ["setsid", "--fork", "nsenter", f"--net={NETNS / self._netns(host)}"]
        own = ["unshare", "--uts", "--ipc", "--mount", "sh", "-c", _HOLDER, "sh"]
        said = run(*enter, *own, host, self.folder / "hosts")
        if not said.strip().isdigit():  # setsid says nothing of how its child fared
            raise ClusterError(f"{host} does not start: {said.strip()}")
        network = (NETNS / self._netns(host)).stat().st_ino
        self._pid_file(host).write_text(f"{said.strip()} {network}\n")

    def _holder(self, host):
        """Return the pid of a live host, else None. Also from inside another host."""
        try:
            pid, network = map(int, self._pid_file(host).read_text().split())
            return pid if network_of(pid) == network else None
        except FileNotFoundError:
            return None

    def _pid_file(self, host):
        return self.folder / f"{host}.pid"

    def _remove(self, host):
        """Remove its network, and with it the kernel's end of every connection."""
        self._pid_file(host).unlink(missing_ok=True)
        if host in self._members():
            self._end_processes(host)
            self._in("switch", "ip", "link", "del", f"p{host}", check=False)
            run("ip", "netns", "del", self._netns(host))

    def _members(self):
        """Return which of its hosts, and its switch, have a network."""
        prefix = self._netns("")
        names = os.listdir(NETNS) if NETNS.exists() else []
        found = [each.removeprefix(prefix) for each in names if each.startswith(prefix)]
        return sorted(each for each in found if re.fullmatch(r"h\d+|switch", each))

    def _netns(self, member):
        return f"ringcomm-{self.name}-{member}"

    def _in(self, member, tool, *arguments, check=True):
        """Run ip or tc in the network of a member."""
        run(tool, "-n", self._netns(member), *arguments, check=check)

    def _pids(self, member):
        """Return the processes in a member's network, which stands as long as it has a name."""
        try:
            network = (NETNS / self._netns(member)).stat().st_ino
        except FileNotFoundError:
            return []
        return [int(p) for p in os.listdir("/proc") if p.isdigit() and network_of(p) == network]

    def _end_processes(self, member):
        deadline = time.monotonic() + _KILL_S
        while pids := self._pids(member):
            if time.monotonic() > deadline:
                raise ClusterError(f"{member}: processes {pids} survive SIGKILL")
            self._signal(member, pids, signal.SIGKILL)
            time.sleep(0.001)  # a kill takes effect when the process is next scheduled

    def _signal(self, member, pids, what):
        """Send a signal; a pid that has changed hands meanwhile is left alone."""
        network = (NETNS / self._netns(member)).stat().st_ino
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                signal_if(pid, what, lambda pid=pid: network_of(pid) == network)


def signal_if(pid, what, is_it):
    """Send a signal if is_it(), to the process that was asked about where Python has pidfds."""
    if not hasattr(os, "pidfd_open"):  # as in builds against old headers
        if is_it():
            os.kill(pid, what)
        return
    pidfd = os.pidfd_open(pid)
    try:
        if is_it():
            signal.pidfd_send_signal(pidfd, what)
    finally:
        os.close(pidfd)


def burst_of(rate):
    """Return what tbf may send at once: 1 ms of the rate, in bytes, but at least 16 KiB."""
    match = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if match is None and rate != "none":
        raise ClusterError(f"{rate!r} is no rate: 200mbit, 1gbit, 500kbit or none")
    return max(16 << 10, int(bytes_per_second(rate) / 1000)) if match else 0


def bytes_per_second(rate):
    """Return 25e6 for "200mbit"."""
    return int(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]] / 8


def index_of(host):
    """Return 2 for "h2"."""
    return int(host.removeprefix("h"))


def network_of(pid):
    """Return what tells the network namespace of a process, or None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def state_of(pid):
    """Return the letter that the kernel has for what a process does, or "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def run(*command, check=True):
    """Run a tool and return what it printed.

    Raises:
        ClusterError: it failed; with its own words.
    """
    command = [str(part) for part in command]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if check and done.returncode != 0:
        raise ClusterError(f"{shlex.join(command[:6])}: {done.stdout.strip()}")
    return done.stdout
