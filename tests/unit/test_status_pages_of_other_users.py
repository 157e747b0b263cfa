"""Only processes of the same user see a rank's status page, and only they can give it commands."""

import os
import subprocess
import sys

import pytest

# Process A keeps a page as user `owner`; process B looks for it as user `looker`.
LOOK = """
import os, sys
from ringcomm._core import StatusPage, monotonic_ns
from ringcomm.launch.watch.find_ranks import Ranks

owner, looker = map(int, sys.argv[1:])
job = f"of-{os.getpid()}"  # the A of another test may live for a moment more
ready, tell = os.pipe()
hold, release = os.pipe()
if (child := os.fork()) == 0:
    os.close(release)
    os.setuid(owner)
    page = StatusPage.create(job=job, host="h", rank=0, size=1, local_rank=0, nonce=7)
    os.write(tell, str(page.fd).encode())
    os.read(hold, 1)  # until B has ended
    os._exit(0)
fd = int(os.read(ready, 9))
os.setuid(looker)
ranks = Ranks()
ranks.search()
print(job in [each.job for each in ranks.sample(monotonic_ns())])
for look in (StatusPage.look, StatusPage.look_to_ask):
    try:
        look(child, fd)
    except (OSError, RuntimeError):
        print("refused")
    else:
        print("seen")
"""
OTHER = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    ("owner", "looker", "is_seen"),
    [(0, 0, True), (OTHER, 0, False), (0, OTHER, False), (OTHER, OTHER - 1, False)],
)
def test_a_page_is_seen_by_its_own_user_alone(owner, looker, is_seen):
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOK, str(owner), str(looker)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    word = "seen" if is_seen else "refused"
    assert done.stdout.split() == [str(is_seen), word, word], done
