"""Who may read what `ringcomm top --prometheus-port` serves."""

import http.client
import re
import socket
import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("prometheus_client", reason="the core is tested without it, too")

from ringcomm.errors import ConfigError
from ringcomm.launch.watch import prometheus, top

TOKEN = "0123456789abcdef"


@pytest.fixture
def serve():
    """A function of a token that starts a server and returns its port."""
    with ExitStack() as stack:

        def start(token=""):
            server = stack.enter_context(prometheus.make_server(0, "no such job", token))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_port

        yield start


def ask(port, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("GET", "/metrics", skip_host=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, "ringcomm_up" in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("localhost:9999", 200),  # ssh -L 9999:127.0.0.1:9400
        ("127.0.0.1", 200),
        ("evil.example:{port}", 421),  # a name of the attacker's, whose address is 127.0.0.1 now
        ("127.0.0.1.evil.example", 421),
        ("evil.example,127.0.0.1", 421),
        ("", 421),
    ],
)
def test_a_page_of_another_host_name_gets_no_numbers(host, status, serve):
    port = serve()
    assert ask(port, host=host.format(port=port)) == (status, status == 200)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        ("Bearer wrong", 401),
        (f"Bearer {TOKEN}x", 401),
        (TOKEN, 401),
        ("Bearer ", 401),
        ("", 401),
        ("Bearer \xe9", 401),
    ],
)
def test_with_a_token_only_who_has_it_gets_numbers(authorization, status, serve):
    has = {"authorization": authorization} if authorization else {}
    assert ask(serve(TOKEN), host="127.0.0.1", **has) == (status, status == 200)


def test_idle_connections_lock_nobody_out(serve, capfd):
    port = serve()
    n_threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(port, host="127.0.0.1") == (200, True)
        assert threading.active_count() - n_threads <= 2 * prometheus._MOST
    assert capfd.readouterr() == ("", "")


def test_who_asks_for_nothing_is_gone_after_a_time(serve, monkeypatch, capfd):
    assert 0 < prometheus._Handler.timeout <= 10
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.01)
    with socket.create_connection(("127.0.0.1", serve()), timeout=60) as idle:
        idle.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        assert idle.recv(1) == b""
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (TOKEN, 0o644, "every user can read or write it (mode 0644)"),
        (TOKEN, 0o602, "every user can read or write it (mode 0602)"),
        ("", 0o600, "it must have a token of 16 or more characters"),
        ("short", 0o600, "it must have a token of 16 or more characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "it must have a token of 16 or more characters"),
    ],
)
def test_a_token_that_keeps_nobody_out_is_refused(content, mode, why, tmp_path):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    text = re.escape(f"RINGCOMM_PROMETHEUS_TOKEN_FILE={path}: {why}")
    with pytest.raises(ConfigError, match=f"^{text}"):
        prometheus._token_in(str(path))


def test_a_token_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_PROMETHEUS_TOKEN_FILE", str(tmp_path / "token"))
    assert top.main(["--prometheus-port", "0"]) == 1
    why = f"RINGCOMM_PROMETHEUS_TOKEN_FILE={tmp_path / 'token'}: No such file or directory"
    assert capsys.readouterr().err == f"ringcomm top: {why}\n"


def test_the_token_is_what_prometheus_reads_from_the_same_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    assert prometheus._token_in(str(path)) == TOKEN
