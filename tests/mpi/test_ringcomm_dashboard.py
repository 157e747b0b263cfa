"""`ringcomm dashboard`: who may read it, and what it shows of live jobs and of runs."""

import base64
import contextlib
import fcntl
import http.client
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from harness import (
    BIN,
    HANG_S,
    IS_MPICH,
    is_running,
    job_environment,
    run_command,
    start_run,
    wait_until,
)

from ringcomm.launch.dashboard.access import OPEN, Asked, Gate, judge
from ringcomm.launch.dashboard.command import listen
from ringcomm.launch.dashboard.source import Source, newest_run
from ringcomm.launch.job.run_folder import RunFolder


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = has_ipv6()
GATE = Gate("own", 8000, "secret")
HOME = {"host": "own.localhost:8000", "authorization": "Bearer secret"}
OWN = {"origin": "http://own.localhost:8000"}
REQUESTS = [
    # method, path, what it has -> status
    ("GET", "/log/0", HOME, 200),
    ("HEAD", "/log/0", HOME, 200),
    ("GET", "/log/0", HOME | OWN, 200),
    ("GET", "/log/0", HOME | {"host": "127.0.0.1:8000"}, 200),
    ("GET", "/log/0", HOME | {"host": "localhost:8000"}, 200),
    ("GET", "/log/0", HOME | {"host": "[::1]:8000"}, 200),
    ("GET", "/log/0", HOME | {"host": "other.localhost:8000"}, 421),
    ("GET", "/log/0", HOME | {"host": "evil.example:8000"}, 421),
    ("GET", "/log/0", HOME | {"host": "127.0.0.1"}, 421),
    ("GET", "/log/0", HOME | {"host": "127.0.0.1:8001"}, 421),
    ("GET", "/log/0", HOME | {"host": ""}, 421),
    ("GET", "/", {"host": "evil.example:8000"}, 421),
    ("GET", "/", {"host": "own.localhost:8000"}, 200),
    ("GET", "/static/app.js", {"host": "own.localhost:8000"}, 200),
    ("POST", "/", {"host": "own.localhost:8000"}, 401),
    ("GET", "/stream", {"host": "own.localhost:8000"}, 401),
    ("GET", "/stream", HOME | {"authorization": "secret"}, 401),
    ("GET", "/stream", HOME | {"authorization": "Bearer Secret"}, 401),
    ("GET", "/stream", HOME | {"authorization": "Bearer sécret"}, 401),
    ("GET", "/stream", HOME | {"authorization": "Bearer "}, 401),
    ("GET", "/stream", HOME | {"origin": "http://own.localhost:9000"}, 403),
    ("POST", "/command", HOME | OWN, 200),
    ("POST", "/command", HOME, 403),
    ("POST", "/command", HOME | {"origin": "http://evil.example"}, 403),
    ("POST", "/command", HOME | {"origin": "http://127.0.0.1:8000"}, 403),
    ("POST", "/command", HOME | {"origin": "https://own.localhost:8000"}, 403),
    ("POST", "/command", HOME | {"origin": "null"}, 403),
    ("POST", "/command", {"host": "own.localhost:8000"} | OWN, 401),
    ("DELETE", "/command", HOME, 403),
    ("PUT", "/command", HOME | OWN | {"host": "evil.example"}, 421),
]


@pytest.mark.parametrize(("method", "path", "has", "status"), REQUESTS)
def test_access(method, path, has, status):
    assert judge(GATE, Asked(method, path, **has)) == status


# --- the server ---------------------------------------------------------------------------------
class Dashboard:
    def __init__(self, cwd, *arguments, before=()):
        self.process = subprocess.Popen(
            [*before, BIN / "ringcomm", "dashboard", *arguments],
            cwd=cwd,
            env=job_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.address = self.process.stdout.readline().strip()
        address = r"http://(ringcomm-[0-9a-f]{16}\.localhost:(\d+))/#(.{40,})"
        match = re.fullmatch(address, self.address)
        self.host, self.port, self.token = match[1], int(match[2]), match[3]
        self.open = contextlib.ExitStack()

    def ask(self, path, method="GET", *, body=None, **headers):
        headers = {"host": self.host} | headers
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self.open.enter_context(contextlib.closing(connection))
        connection.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        return self.open.enter_context(connection.getresponse())

    @property
    def key(self):
        return {"authorization": f"Bearer {self.token}"}

    @property
    def own(self):
        """What the page itself sends with a command."""
        return self.key | {"origin": f"http://{self.host}"}

    def states(self):
        """Yield what the page gets."""
        answer = self.ask("/stream", **self.key)
        assert answer.headers["content-type"] == "application/x-ndjson"
        while line := answer.readline():
            yield json.loads(line)

    def end(self):
        """Press Ctrl-C while pages are open."""
        with self.open:
            self.process.send_signal(signal.SIGINT)
            try:
                said = self.process.communicate(timeout=60)
            finally:
                self.process.kill()
        out, err = said
        assert (self.process.returncode, out) == (0, "")
        assert re.fullmatch(r"ringcomm dashboard: .*show.*\n", err), err  # what, and no more


@pytest.fixture
def dashboard(tmp_path):
    pytest.importorskip("starlette", reason="the core is tested without it, too")
    started = []

    def start(*arguments, **options):
        started.append(Dashboard(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


TRAIN = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
rc.init()
print("<script>alert(1)</script>", flush=True)
for step in range(10**9):
    if os.path.exists("fail") and rc.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1 if rc.rank() == 2 else 0)
    rc.allreduce(np.ones(1000), name="w")
    if step % 2 == 0:
        rc.log(step=step, loss=1 / (step + 1))
"""


@pytest.fixture
def run(tmp_path):
    """A run of 3 ranks, of which rank 2 dies when a file is there."""
    process = start_run(3, TRAIN, cwd=tmp_path, output=subprocess.DEVNULL)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists, "nothing was logged")
    yield process
    (tmp_path / "fail").touch()
    assert process.wait(HANG_S) == 137


def test_a_live_run_is_shown_and_a_death_within_a_second(run, dashboard, tmp_path):
    page = dashboard("run")
    states = page.states()
    state = next(states)
    assert state["title"] == "run"
    losses = {each["rank"]: each["points"] for each in state["metrics"]}
    assert losses[1][0] == [0, 1.0]
    for state in states:
        ranks = {each["rank"]: each for each in state["ranks"]}
        if len(ranks) == 3 and all(each["wait"] is not None for each in ranks.values()):
            break
    assert not any(each["is_bad"] for each in ranks.values())
    (tmp_path / "fail").touch()
    wait_until(lambda: not is_running(ranks[2]["pid"]), "rank 2 does not die")
    died = time.monotonic()
    for state in states:
        ranks = {each["rank"]: each for each in state["ranks"]}
        if ranks.get(2, {}).get("is_bad"):
            break
    assert time.monotonic() - died < 1.0
    assert run.wait(HANG_S) == 137
    end = next(state["end"] for state in states if state["end"])
    assert (end["code"], end["rank"]) == (137, 2)
    assert [each["rank"] for each in next(states)["ranks"] if each["is_bad"]] == [2]


def test_a_finished_run_is_shown_from_its_folder(dashboard, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, ringcomm as rc\nrc.init()\nrc.log(step=1, loss=2.0)\nprint('<b>Ä</b>')\n"
    )
    ended = subprocess.run(
        [BIN / "ringcomm", "run", "-np", "2", "train.py"],
        cwd=tmp_path,
        env=job_environment({"TMPDIR": str(tmp_path)}),
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended
    page = dashboard()  # the newest of `runs`
    state = next(page.states())
    assert [(each["rank"], each["state"], each["is_bad"]) for each in state["ranks"]] == [
        (0, "exit 0", False),
        (1, "exit 0", False),
    ]
    losses = [tuple(each.values()) for each in state["metrics"]]
    assert sorted(losses) == [(0, "loss", [[1, 2.0]]), (1, "loss", [[1, 2.0]])]
    answer = page.ask("/log/1", **page.key)
    assert answer.read().decode() == "<b>Ä</b>\n"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("code", "first", "codes", "bad"),
    [
        (3, 1, {"0": 1, "1": 3, "2": 1}, [1]),  # the others ended because of it
        (75, None, {"0": 75, "1": 0, "2": 75}, []),  # asked to stop
        (130, None, {"0": None, "1": 1, "2": None}, []),  # Ctrl-C, which no rank handles
        (143, None, {"0": 143, "1": None}, []),
        (137, None, {"0": None, "1": 0}, [0]),
        (75, None, {"0": 75, "1": 137, "2": 75}, [1]),  # elastic, and could not go on
        (0, None, {"0": 0, "1": 137, "2": None}, [1, 2]),  # elastic, and went on
        (1, None, {"0": 75, "1": 0, "2": 0}, [0]),
    ],
)
def test_of_a_finished_run_those_are_bad_that_failed_by_themselves(
    code, first, codes, bad, tmp_path
):
    (tmp_path / "run.json").write_text("{}")
    end = {"code": code, "what": "", "rank": first, "report": "", "exit_codes": codes}
    (tmp_path / "end.json").write_text(json.dumps(end))
    source = Source(RunFolder(tmp_path))
    assert [each["rank"] for each in source.state()["ranks"] if each["is_bad"]] == bad


def test_of_a_finished_run_it_is_said_what_those_did_that_were_lost(tmp_path):
    (tmp_path / "run.json").write_text('{"ranks": 4}')
    for rank, role in ((2, "rank 1"), (3, "spare")):
        (tmp_path / f"rank-{rank}.end").write_text(f"began\nrole {role}\nexit 000\n")
    lost = {"0": "killed by SIGKILL", "1": "raised ValueError"}
    codes = {"0": None, "1": 1, "2": 0, "3": 0}
    end = {"code": 0, "what": "completed", "rank": None, "report": "", "exit_codes": codes}
    (tmp_path / "end.json").write_text(json.dumps(end | {"lost": lost}))
    state = Source(RunFolder(tmp_path)).state()
    assert [(each["state"], each["as_rank"], each["is_bad"]) for each in state["ranks"]] == [
        ("killed by SIGKILL", None, True), ("raised ValueError", None, True),
        ("exit 0", 1, False), ("exit 0", None, False),
    ]  # fmt: skip
    assert state["job"]["text"] == (
        "lost rank 0 (killed by SIGKILL) and rank 1 (raised ValueError) on the way"
    )
    report = "x rank 1 (host h, pid 9) was killed by SIGKILL (out of memory?)\n"
    failed = {"code": 137, "rank": 1, "report": report, "exit_codes": {"0": 1, "1": None}}
    (tmp_path / "end.json").write_text(json.dumps(end | failed))
    ranks = Source(RunFolder(tmp_path)).state()["ranks"]
    assert [(each["state"], each["is_bad"]) for each in ranks] == [
        ("exit 1", False), ("killed by SIGKILL", True),
    ]  # fmt: skip


@pytest.mark.parametrize("n_looks", [0, 1])
def test_a_run_that_is_removed_while_the_newest_is_sought_is_not_it(n_looks, tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    os.utime(tmp_path / "old" / "run.json", (1, 1))
    (tmp_path / "file").touch()
    looks, stat = iter(range(100)), Path.stat

    def removing(path, **options):
        if path == tmp_path / "old" / "run.json" and next(looks) == n_looks:
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", removing)
    assert newest_run(tmp_path).path == tmp_path / "new"


def test_the_server_answers_as_the_matrix_says(dashboard, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    page = dashboard("run")
    here, ours = f"http://{page.host}", page.own
    expected = [
        ("/", "GET", {}, 200),
        ("/static/app.js", "GET", {}, 200),
        ("/static/uPlot.iife.min.js", "GET", {}, 200),
        ("/static/words.js", "GET", {}, 200),
        ("/static/icon.svg", "GET", {}, 200),
        ("/runs", "GET", {}, 401),
        ("/runs", "GET", page.key, 200),
        ("/runs", "GET", page.key | {"host": f"evil.example:{page.port}"}, 421),
        ("/runs", "GET", page.key | {"origin": "http://evil.example"}, 403),
        ("/logs", "GET", {}, 401),
        ("/logs", "GET", page.key | {"origin": "null"}, 403),
        ("/logs?after=x,9:-1,%00", "GET", page.key, 200),
        ("/logs/all", "GET", {}, 401),
        ("/logs/all", "GET", page.key, 200),
        ("/stacks/0", "GET", page.key, 405),
        ("/stacks/0", "POST", {"origin": here}, 401),
        ("/stacks/0", "POST", page.key, 403),
        ("/stacks/0", "POST", ours | {"host": f"evil.example:{page.port}"}, 421),
        ("/stacks/0", "POST", ours, 200),
        ("/stream?run=%2Fetc", "GET", page.key, 404),
        ("/logs?run=..%2Frun", "GET", page.key, 404),
        ("/command?run=none", "POST", ours, 400),
        ("/", "POST", {}, 401),
        ("/static/server.py", "GET", {}, 401),
        ("/stream", "GET", {}, 401),
        ("/log/0", "GET", {}, 401),
        ("/log/0", "GET", {"cookie": f"ringcomm-{page.port}={page.token}"}, 401),
        (f"/log/0?token={page.token}", "GET", {}, 401),
        ("/log/0", "GET", {"authorization": "Bearer wrong"}, 401),
        ("/", "GET", {"host": f"evil.example:{page.port}"}, 421),
        ("/stream", "GET", page.key | {"host": f"evil.example:{page.port}"}, 421),
        ("/log/0", "GET", page.key | {"host": f"127.0.0.1:{page.port}"}, 200),
        ("/log/0", "POST", page.key, 403),
        ("/log/0", "POST", ours, 405),
        ("/log/../run.json", "GET", page.key, 404),
        ("/log/%2e%2e%2frun.json", "GET", page.key, 404),
        ("/static/..%2fserver.py", "GET", page.key, 404),
        ("/static/%00", "GET", page.key, 404),
        ("/log/-1", "GET", page.key, 404),
        ("/ctl", "GET", page.key, 404),
        ("/command", "GET", page.key, 405),
        ("/command", "POST", {"origin": here}, 401),
        (f"/command?token={page.token}", "POST", {"origin": here}, 401),
        ("/command", "POST", page.key, 403),
        ("/command", "POST", ours | {"origin": "http://evil.example"}, 403),
        ("/command", "POST", ours | {"origin": "null"}, 403),
        ("/command", "POST", ours | {"origin": f"{here}.evil.example"}, 403),
        ("/command", "POST", ours | {"host": f"evil.example:{page.port}"}, 421),
        ("/command", "POST", ours, 400),  # no body
    ]
    found = []
    for path, method, headers, _ in expected:
        answer = page.ask(path, method, **headers)
        found.append((path, method, headers, answer.status))
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["set-cookie"] is None
    assert found == expected
    nbytes = sum(len(page.ask(path).read()) for path in OPEN)
    assert nbytes < 150_000, "a page takes too long over a slow line"


def command_of(page, *words):
    body = json.dumps({"command": words}).encode()
    answer = page.ask("/command", "POST", body=body, **page.own)
    return answer.status, answer.read().decode()


def test_the_server_takes_the_commands_of_the_list_and_nothing_else(dashboard, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    page = dashboard("run")
    assert command_of(page, "pause") == (409, "there is no live job of this user on this host\n")
    for words in (
        ["ls"],
        ["sh", "-c", "touch x"],
        [],
        ["set", "lr"],
        ["stacks"],
        ["pause", "; ls"],
    ):
        status, text = command_of(page, *words)
        assert (status, "<" in text) == (400, False), words
    bodies = [b"", b"{", b"[]", b"3", b'{"command": "pause"}', b'{"command": [1]}', b"\xff" * 9]
    for body in bodies:
        assert page.ask("/command", "POST", body=body, **page.own).status == 400, body
    assert page.ask("/command", "POST", body=b" " * 2000, **page.own).status == 413


CONTROLLED = """
import time
import ringcomm as rc
P = rc.Params(lr=rc.live(0.1))
rc.init()
while not rc.should_stop():
    rc.allreduce_(__import__("numpy").ones(3))
    rc.step()
    time.sleep(0.005)  # a step takes so long
print(P.lr, flush=True)
"""


@pytest.mark.at_length  # it sends what `ringcomm ctl` sends
def test_the_dashboard_controls_the_job_that_it_shows(dashboard, tmp_path):
    job = start_run(2, CONTROLLED, cwd=tmp_path, output=subprocess.DEVNULL)
    wait_until((tmp_path / "run" / "run.json").exists, "it does not start")
    page = dashboard("run")
    for state in page.states():
        if len(state["ranks"]) == 2 and all(each.get("step", 0) for each in state["ranks"]):
            break
    status, text = command_of(page, "set", "lr=0.5")
    assert (status, text.startswith("lr is 0.5 after step ")) == (200, True), text
    assert command_of(page, "resume") == (409, "the job is not paused\n")
    assert command_of(page, "stop")[0] == 200
    assert job.wait(HANG_S) == 75
    assert (tmp_path / "run" / "rank-1.log").read_text() == "0.5\n"


def test_only_this_host_is_listened_to(dashboard, tmp_path):
    page = dashboard()
    port = f":{page.port:04X}"
    listeners = {
        line.split()[1].removesuffix(port)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[1].endswith(port) and line.split()[3] == "0A"
    }
    ours = {"0100007F", "00000000000000000000000001000000"} if HAS_IPV6 else {"0100007F"}
    assert listeners == ours


@pytest.mark.skipif(not HAS_IPV6, reason="there is no IPv6")
def test_a_port_on_which_another_listens_at_the_other_address_of_localhost_is_not_taken():
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as other,
        pytest.raises(OSError, match="Address already in use"),
    ):
        listen(other.getsockname()[1])
    for each in listen(0):
        each.close()


def test_idle_connections_lock_nobody_out_and_take_no_time(dashboard, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    page = dashboard("run", before=("sh", "-c", 'ulimit -n 256; exec "$@"', "sh"))
    stat = Path(f"/proc/{page.process.pid}/stat")

    def cpu_s():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    states = page.states()
    next(states)
    with contextlib.ExitStack() as stack:
        for i in range(300):
            idle = socket.create_connection(("127.0.0.1", page.port), timeout=HANG_S)
            stack.enter_context(idle)
            if i % 20 == 0:
                assert page.ask("/log/0", **page.key).status == 200
        used, began = cpu_s(), time.monotonic()
        for _ in range(4):
            next(states)
        assert cpu_s() - used < 0.5 * (time.monotonic() - began)
        assert page.ask("/log/0", **page.key).status == 200
    # The fixture fails if the dashboard has said anything.


def test_a_page_reads_a_long_run_by_pieces(dashboard, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    n = 100_000
    lines = (f'{{"time": 1795637.25, "step": {i}, "loss": {i / 8}}}\n' for i in range(n))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    page, found = dashboard("run"), []
    for state in page.states():
        assert len(json.dumps(state)) < 1 << 18
        found += [point for each in state["metrics"] for point in each["points"]]
        if found and found[-1][0] == n - 1:
            break
    assert 2000 < len(found) <= 5000
    assert all(value == step / 8 for step, value in found)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(found)]
    assert 1 <= min(gaps) <= max(gaps) < 3 * n / 4000


def test_a_port_that_is_taken_is_refused():
    pytest.importorskip("starlette", reason="the core is tested without it, too")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = str(listener.getsockname()[1])
        command = [BIN / "ringcomm", "dashboard", "--port", number]
        done = run_command(command, env=job_environment())
    assert done.returncode == 1
    text = f"ringcomm dashboard: port {number}: Address already in use. Choose another by --port\n"
    assert done.stderr == text


def test_a_name_of_nothing_that_is_there_is_told(tmp_path):
    pytest.importorskip("starlette", reason="the core is tested without it, too")
    command = [BIN / "ringcomm", "dashboard", "no such job"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=job_environment(), **pipes) as process:
        said = process.stderr.readline()
        process.kill()
    assert "'no such job' is no folder of a run, and no live job of this user" in said


CHROMIUM = shutil.which("chromium")
READY = (
    "document.body.dataset.ready === '1' && "
    "document.querySelectorAll('#charts .uplot').length === 1"
)
# What text of the page has less contrast than the least of WCAG 2 for texts, AA.
PALE = """
(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const weight = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = parts(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest("svg") || e.tagName === "OPTION") continue;
    const [a, b] = [parts(getComputedStyle(e).color), behind(e)].map(weight);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) pale.push(`${e.tagName} ${e.id} ${e.textContent.slice(0, 20)} ${ratio}`);
  }
  return JSON.stringify(pale);
})()
"""
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Browser:
    """A headless Chromium, driven by its own protocol over two pipes."""

    def __init__(self, folder):
        (its_in, self._out), (self._in, its_out) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        options += f" --window-size=1200,1200 --user-data-dir={folder}/browser about:blank"
        self._process = subprocess.Popen(
            [CHROMIUM, *options.split()],
            pass_fds=(3, 4),  # where the browser expects the pipes
            preexec_fn=lambda: moved({its_in: 3, its_out: 4}),  # noqa: PLW1509 - no threads here
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        self._n, self._rest, self._session = 0, b"", {}
        pages = self("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def __call__(self, method, **parameters):
        """Call a method of the protocol, and return its result."""
        self._n += 1
        call = {"id": self._n, "method": method, "params": parameters} | self._session
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while (answer := self._next()).get("id") != self._n:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def value(self, expression):
        """Return the value of a JavaScript expression in the page."""
        return self("Runtime.evaluate", expression=expression)["result"].get("value")

    def end(self):
        self._process.terminate()
        self._process.wait(60)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt install chromium")
    started = Browser(tmp_path)
    yield started
    started.end()


def test_a_browser_shows_the_run_and_the_death_of_a_rank_within_a_second(
    browser, run, dashboard, tmp_path
):
    page = dashboard("run")
    browser("Page.navigate", url=page.address)
    wait_until(lambda: browser.value(READY), "the page shows nothing")
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    wait_until(lambda: browser.value(paint) is not None, "nothing is painted")
    assert browser.value(paint) < 1000 * seconds_of_one_core()  # ms
    assert browser.value("location.href") == f"http://{page.host}/"
    assert browser("Network.getAllCookies")["cookies"] == []
    assert browser.value("document.querySelector('.u-title').textContent") == "loss"
    assert browser.value("document.querySelectorAll('circle.node').length") == 3
    assert browser.value("document.querySelectorAll('#ranks tr').length") == 3
    values = "$('ranks').rows[1].cells[11].textContent"
    assert re.fullmatch(r"loss=[\d.e-]+", browser.value(values)), browser.value(values)
    points = "Array.from({length: 2e5}, (_, i) => [i, i])"
    browser.value(f"addMetrics([{{rank: 0, name: 'late', points: {points}}}])")
    points = "[...charts.get('late').series.get(0).points]"
    assert 1000 < browser.value(f"{points}.length") <= 4000
    assert browser.value(f"{points}.every(([step, value]) => step === value)") is True
    assert browser.value(f"{points}.at(-1)[0]") >= 200_000 - 128
    browser.value("charts.get('late').plot?.root.remove(); charts.delete('late')")
    log = "document.querySelector('#log').textContent"
    text = "".join(f"[{rank}] <script>alert(1)</script>\n" for rank in range(3))
    wait_until(lambda: browser.value(log) == text, lambda: browser.value(log))
    browser.value("$('which').value = '1'; $('find').value = 'alert.1'; showLines()")
    assert browser.value(log) == "<script>alert(1)</script>\n"
    browser.value("$('find').value = 'nothing'; showLines()")
    assert browser.value(log) == ""
    assert browser.value("$('state').textContent") == "training"
    assert browser.value("$('command').textContent") == "train.py"
    browser.value("document.querySelector('#ranks button').click()")
    frames = "$('frames').textContent"
    wait_until(lambda: "train.py" in browser.value(frames), lambda: browser.value(frames))
    browser.value("$('stacks').close()")
    if target := os.environ.get("SCREENSHOTS"):  # docs/images
        wait_until(lambda: browser.value("columns.length") > 30, "no time passes")
        shoot(browser, Path(target) / "dashboard.png")
    wait_until((tmp_path / "run" / "use.jsonl").exists, "no use of the host is recorded")
    pid = RunFolder(tmp_path / "run").ranks()[2].pid
    (tmp_path / "fail").touch()
    wait_until(lambda: not is_running(pid), "rank 2 does not die")
    died = time.monotonic()
    is_shown = "document.querySelectorAll('circle.node.bad').length > 0"
    wait_until(lambda: browser.value(is_shown), "the death is not shown")
    assert time.monotonic() - died < seconds_of_one_core()
    wait_until(lambda: "exit 137" in browser.value("$('text').textContent"), "no end is shown")
    assert browser.value("$('state').textContent") == "failed"
    enabled = "document.querySelectorAll('#control :enabled, #ranks button:enabled').length"
    wait_until(lambda: browser.value(enabled) == 0, "buttons are on after the end")
    wait_until(lambda: kinds_of_events(browser)[-2:] == ["death", "end"], "no death among events")
    if target:
        are_drawn = "[...charts.values()].every((chart) => !chart.isNew)"
        wait_until(lambda: browser.value(are_drawn), "the marks are not drawn")
        shoot(browser, Path(target) / "dashboard-death.png")
    browser("Page.reload")
    wait_until(
        lambda: (browser.value("columns.length") or 0) > 0, "no history from the run's files"
    )
    assert browser.value("columns.at(-1).ranks.size") == 3


SERVICE_WORKER = """
addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
const page = "<title>stolen</title><body data-ready=1>";
const html = { headers: { "content-type": "text/html" } };
addEventListener("fetch", (event) => event.respondWith(new Response(page, html)));
"""
LURE = """<title>lure</title><script src="/static/app.js"></script><script>
navigator.serviceWorker.register("/worker.js").then(() => navigator.serviceWorker.ready)
  .then(() => document.title = "left")
</script>"""


class OtherServer(http.server.BaseHTTPRequestHandler):
    """A web server of another user of this host, which leaves in a browser what it can."""

    PAGES: ClassVar = {
        "/": ("text/html", LURE),
        "/static/app.js": ("text/javascript", "document.title = 'stolen'"),
        "/worker.js": ("text/javascript", SERVICE_WORKER),
    }

    def do_GET(self):
        self.server.heard.append(str(self.headers) + self.path)
        kind, text = self.PAGES.get(self.path, ("text/plain", ""))
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.send_header("cache-control", "max-age=31536000, immutable")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def other_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        server.heard = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def one_value_logged(folder):
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def test_a_server_on_another_port_gets_nothing_from_the_browser(browser, dashboard, tmp_path):
    one_value_logged(tmp_path / "run")
    page = dashboard("run")
    browser("Page.navigate", url=page.address)
    wait_until(lambda: browser.value(READY), "the page shows nothing")
    with other_server() as other:
        for name in ("127.0.0.1", page.host.partition(":")[0]):
            heard = len(other.heard)
            browser("Page.navigate", url=f"http://{name}:{other.server_port}/")
            wait_until(lambda: browser.value("document.title") == "left", "it is not opened")
            seen = browser.value("document.cookie + JSON.stringify({...sessionStorage})")
            assert seen == "{}"
            assert len(other.heard) > heard
    assert not [each for each in other.heard if page.token in each]


def test_what_another_server_has_left_in_the_browser_for_the_port_is_not_run(
    browser, dashboard, tmp_path
):
    one_value_logged(tmp_path / "run")
    with other_server() as other:
        browser("Page.navigate", url=f"http://127.0.0.1:{other.server_port}/")
        wait_until(lambda: browser.value("document.title") == "left", "it leaves nothing")
    page = dashboard("run", "--port", str(other.server_port))
    browser("Page.navigate", url=page.address)
    wait_until(lambda: browser.value("document.body?.dataset.ready === '1'"), "no page")
    assert browser.value("document.title") == "run - ringcomm"


def test_a_reload_shows_the_page_again_and_who_lacks_the_token_is_told(
    browser, dashboard, tmp_path
):
    one_value_logged(tmp_path / "run")
    page = dashboard("run")
    browser("Page.navigate", url=page.address)
    wait_until(lambda: browser.value(READY), "the page shows nothing")
    browser.value("document.body.dataset.ready = ''")
    browser("Page.reload")
    wait_until(lambda: browser.value(READY), "the page shows nothing after a reload")
    browser("Page.navigate", url=f"http://127.0.0.1:{page.port}/")  # another origin
    told = "document.getElementById('lost').textContent"
    wait_until(lambda: "no access: open" in (browser.value(told) or ""), "nobody is told")


# What a rank did that was killed: an old kernel does not say by what.
LOST = "killed by SIGKILL|ended without a word"
ELASTIC = """
import os, signal, time
import numpy as np
import ringcomm as rc
rc.init()
@rc.elastic.run
def train(state):
    me = rc.elastic.view().members[rc.rank()]
    while True:
        if me == 2 and os.path.exists("fail"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1 if rc.rank() == 2 else 0)
        state.x += rc.allreduce(np.ones(1000), name="w")
        state.step += 1
        if state.step % 2 == 0:
            rc.log(step=state.step, loss=1 / state.step)
        state.commit()
        if rc.broadcast_object(os.path.exists("enough")):
            return
train(rc.elastic.ArrayState(step=0, x=np.zeros(1000)))
"""


@pytest.fixture
def elastic(tmp_path):
    """A run of 4 ranks and a spare; rank 2 dies when a file is there."""
    options = ("--elastic", "3:4", "--spares", "1")
    process = start_run(4, ELASTIC, cwd=tmp_path, options=options, output=subprocess.DEVNULL)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists, "nothing was logged")
    yield process
    (tmp_path / "enough").touch()
    assert process.wait(HANG_S) == 0


@pytest.mark.skipif(IS_MPICH, reason="after a kill, MPICH's mpiexec ends the whole job")
def test_a_browser_shows_the_death_of_a_rank_and_that_a_spare_takes_its_place(
    browser, elastic, dashboard, tmp_path
):
    def count(kind):
        return browser.value(f"document.querySelectorAll('circle.node{kind}').length")

    def states():
        found = browser.value("JSON.stringify([...$('ranks').rows].map(r => r.cells[5].innerText))")
        return json.loads(found)

    browser("Page.navigate", url=dashboard("run").address)
    wait_until(lambda: count("") == 5 and count(".spare") == 1, "the page shows no spare")
    assert states()[4] == "spare"
    pid = RunFolder(tmp_path / "run").ranks()[2].pid
    (tmp_path / "fail").touch()
    wait_until(lambda: not is_running(pid), "rank 2 does not die")
    died = time.monotonic()
    wait_until(lambda: count(".bad") == 1, "the death is not shown")
    assert time.monotonic() - died < seconds_of_one_core()
    wait_until(lambda: count(".spare") == 0, "the return is not shown")
    assert re.fullmatch("waits|computes", states()[4])
    now = "JSON.stringify([...$('ranks').rows].map(r => r.cells[1].innerText))"
    wait_until(lambda: json.loads(browser.value(now)) == ["0", "1", "", "3", "2"], "not as rank 2")
    wait_until(lambda: re.fullmatch(LOST, states()[2]), "it is not said how rank 2 was lost")
    assert count(".bad") == 1
    wait_until(
        lambda: sorted(kinds_of_events(browser)[:3]) == ["death", "recovery", "spare"],
        lambda: browser.value("$('events').innerText"),
    )
    texts = browser.value("$('events').innerText")
    assert "rank 2 (host" in texts
    assert re.search(r"4 ranks go on \d+\.\d\d s after rank 2 .*, from commit \d+", texts)
    assert "this process takes a place, as rank 2 of 4" in texts
    marked = "JSON.stringify(marks.map((mark) => [mark.kind, mark.step > 0]))"
    wait_until(lambda: '["recovery",true]' in browser.value(marked), lambda: browser.value(marked))
    for dark in ("light", "dark"):
        media = [{"name": "prefers-color-scheme", "value": dark}]
        browser("Emulation.setEmulatedMedia", features=media)
        assert json.loads(browser.value(PALE)) == []
        grid, panel = (browser.value(f"color('{name}')") for name in ("grid", "panel"))
        assert grid != panel
    screen = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser("Emulation.setDeviceMetricsOverride", **screen)
    wait_until(lambda: browser.value("innerWidth") == 400, "the page is not narrow")
    wait_until(lambda: browser.value(TOO_WIDE) <= 0, lambda: browser.value(TOO_WIDE))
    browser("Emulation.clearDeviceMetricsOverride")
    if target := os.environ.get("SCREENSHOTS"):  # docs/images
        wait_until(lambda: browser.value("columns.length") > 30, "no time passes")
        shoot(browser, Path(target) / "dashboard-return.png")
    (tmp_path / "enough").touch()
    state = "$('state').textContent"
    wait_until(lambda: browser.value(state) == "completed", lambda: browser.value(state))
    assert re.search(rf"s, lost rank 2 \({LOST}\) on the way", browser.value("$('text').innerText"))
    assert re.fullmatch(LOST, states()[2])
    wait_until(lambda: kinds_of_events(browser)[-1] == "end", "no end among events")


def kinds_of_events(browser):
    found = "JSON.stringify([...document.querySelectorAll('#events [data-kind]')]"
    return json.loads(browser.value(f"{found}.map((each) => each.dataset.kind))"))


def test_runs_are_listed_first_and_two_of_them_compared_in_one_chart(browser, dashboard, tmp_path):
    (tmp_path / "runs").mkdir()
    for name in ("one", "two"):
        one_value_logged(tmp_path / "runs" / name)
    page = dashboard()
    browser("Page.navigate", url=page.address)
    # Jobs of others on this host are listed, too.
    rows = f"document.querySelectorAll('#runs tr[data-key^=\"{tmp_path}\"]')"
    wait_until(lambda: browser.value(f"{rows}.length") == 2, "no list of runs")
    assert browser.value("$('run').hidden") is True
    browser.value(f"{rows}.forEach((row) => row.querySelector('input').click())")
    assert browser.value("$('compare').disabled") is False
    browser.value("$('compare').click()")
    wait_until(lambda: browser.value(READY), "the page shows nothing")
    labels = "JSON.stringify([...charts.get('loss').plot.series].map((each) => each.label))"
    names = {"step", "one", "two"}
    wait_until(lambda: set(json.loads(browser.value(labels))) == names, "not both are shown")
    assert browser.value("$('state').textContent") == "not seen"


def test_what_the_page_decides_of_itself(browser, dashboard, tmp_path):
    one_value_logged(tmp_path / "run")
    browser("Page.navigate", url=dashboard("run").address)
    wait_until(lambda: browser.value(READY), "the page shows nothing")

    def of(expression):
        return json.loads(browser.value(f"JSON.stringify({expression})"))

    points = "[new Map([[1, 2], [2, 4]]), new Map([[1, 4], [3, 1]])]"
    assert of(f"band({points})") == [[1, 2, 3], [3, 4, 1], [2, 4, 1], [4, 4, 1]]
    assert of("smoothed([1, null, 1, 1], 0.9)") == pytest.approx([1, None, 1, 1])
    assert of("smoothed([0, 1], 0.5)") == pytest.approx([0, 2 / 3])
    assert of("positive([1, 0, -1, null])") == [1, None, None, None]
    assert of("[5.25, 75, 130, 7500, 200000].map(durationText)") == [
        "5.3 s", "75 s", "2 min 10 s", "2 h 05 min", "2 d 7 h",
    ]  # fmt: skip
    rows = "[{rank: 0, x: 5}, {rank: 1, x: null}, {rank: 2, x: 30}]"
    assert of(f"inOrder({rows}, 'x', true).map((row) => row.rank)") == [2, 0, 1]
    assert of("lineTest('a(')('xA(') && !lineTest('^b')('ab')") is True
    ranks = (
        "Array.from({length: 64}, (_, i) => ({rank: i, host: `h${i % 4}`, lives: true, state: ''}))"
    )
    places = of(f"topology({ranks}, 374)")
    assert len({(node["x"], node["y"]) for node in places["nodes"]}) == 64
    assert len(places["hosts"]) == 4
    assert places["width"] <= 374
    assert of(f"ringLinks(topology({ranks}, 374).nodes).length") == 0
    assert of(f"ringLinks(topology({ranks}.slice(0, 4), 374).nodes).length") == 4
    moved = json.dumps(
        [
            {"rank": n, "as_rank": at, "lives": True, "state": ""}
            for n, at in ((0, 0), (1, 2), (2, 1))
        ]
    )
    pairs = f"ringLinks(topology({moved}, 374).nodes)"
    links = of(f"{pairs}.map((pair) => pair.map((node) => node.rank.rank))")
    assert links == [[0, 2], [2, 1], [1, 0]]
    assert of("[1, 7, 12].map((step) => within(step, [5, 9]))") == [5, 7, 9]
    # A zoom stays when points come, and until a double click.
    line = "Array.from({length: 100}, (_, i) => [i + %d, i])"
    chart = "charts.get('loss')"
    browser.value(f"addMetrics([{{rank: 0, name: 'loss', points: {line % 0}}}]); drawCharts()")
    browser.value(f"{chart}.plot.setSelect({{left: 50, width: 60, top: 0, height: 9}})")
    zoom = of(f"{chart}.zoom")
    browser.value(f"addMetrics([{{rank: 1, name: 'loss', points: {line % 100}}}]); drawCharts()")
    scale = f"[{chart}.plot.scales.x.min, {chart}.plot.scales.x.max]"
    wait_until(lambda: of(scale) == pytest.approx([zoom["min"], zoom["max"]]), "no zoom")
    assert of(f"{chart}.plot.series.map((each) => each.label)") == [
        "step", "mean", "largest", "least",
    ]  # fmt: skip
    browser.value(f"{chart}.plot.over.dispatchEvent(new MouseEvent('dblclick'))")
    assert of(f"{chart}.zoom") is None
    browser.value("$('singles').click(); $('log-scale').click()")
    wait_until(
        lambda: of(f"{chart}.plot.series.map((each) => each.label)")[2:] == ["rank 0", "rank 1"],
        "single ranks are not shown",
    )
    assert of(f"{chart}.plot.scales.y.distr") == 3
    # Neighbours of one kind are one mark, but no death or recovery is hidden, and these come first.
    xs = {"checkpoint": (0, 15, 35, 80, 85), "command": (16,), "death": (30, 31), "recovery": (31,)}
    given = [{"kind": kind, "x": x} for kind, at in xs.items() for x in at]
    marks = [(each["kind"], each["x"], each["n"]) for each in of(f"folded({given}, 40)")]
    assert marks == [
        ("death", 30, 1), ("death", 31, 1), ("recovery", 31, 1), ("checkpoint", 0, 2),
        ("command", 16, 1), ("checkpoint", 35, 1), ("checkpoint", 80, 2),
    ]  # fmt: skip
    # An ordered stop is not red.
    assert of("kindOf({is_bad: false, lives: false, state: 'exit 75, as asked'})") == "gone"


def seconds_of_one_core():
    """Return how long a second of work takes now: longer if there are more processes than cores."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count())


def moved(descriptors):
    """Give descriptors of this process the numbers that they are mapped to."""
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd, number in descriptors.items()}
    for number, fd in high.items():
        os.dup2(fd, number)


def shoot(browser, path):
    picture = browser("Page.captureScreenshot", format="png")["data"]
    path.write_bytes(base64.b64decode(picture))
