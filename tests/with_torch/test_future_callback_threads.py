"""The threads that run callbacks of torch.distributed's futures."""

import threading
import time

from harness import wait_until

from ringcomm.torch.distributed.group import work


def test_idle_threads_end_and_no_job_is_lost(monkeypatch):
    monkeypatch.setattr(work, "_IDLE_S", 0.01)
    elastic, done = work.ElasticPool(), []
    before = threading.active_count()
    for n in range(300):
        elastic.submit(lambda n=n: done.append(n))
        if n % 20 == 0:
            time.sleep(0.011)  # about _IDLE_S: a thread ends while the next job comes
    together = threading.Barrier(21)  # as many threads as jobs that wait for each other
    for _ in range(20):
        elastic.submit(lambda: together.wait(60))
    together.wait(60)
    wait_until(lambda: threading.active_count() == before, "idle threads do not end")
    assert sorted(done) == list(range(300))
