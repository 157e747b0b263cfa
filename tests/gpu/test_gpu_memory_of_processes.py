"""The memory on GPUs that `ringcomm top` shows, with an NVML that stands in for NVIDIA's."""

import json
import subprocess
import sys

import pytest
from compile_c_library import compile_library
from harness import job_environment

# This process has memory on two GPUs, and 65 others on the first; that of one is not known.
NVML = """
#include <stdlib.h>
#include <unistd.h>
struct Info { unsigned pid; unsigned long long nbytes; unsigned gpu, compute; };
int nvmlInit_v2(void) { return getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = (void*)(size_t)(index + 1);
  return index == 2 ? 15 : 0;  /* the third is lost */
}
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, struct Info* infos) {
  if (getenv("FAKE_HANG")) pause();
  unsigned n = device == (void*)1 ? 66 : 1, room = *count;
  *count = n;
  if (room < n) return 7;
  for (unsigned i = 0; i < n; ++i) {
    unsigned pid = i == n - 1 ? getpid() : i + 1;
    infos[i] = (struct Info){pid, i == 3 ? ~0ull : 2000000000, 1, 2};
  }
  return 0;
}
#endif
"""
LOOK = """
import json, time
from ringcomm._core import StatusPage, monotonic_ns
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import COLUMNS, as_json, row_of
page = StatusPage.create(job="gpu", host="h", rank=0, size=1, local_rank=0, nonce=7)
ranks = Ranks()
ranks.search()
began = time.monotonic()
[sample] = [each for each in ranks.sample(monotonic_ns()) if each.job == "gpu"]
text = row_of(sample, None).texts[COLUMNS.index("GPU")]
print(json.dumps([as_json(sample)["gpu_nbytes"], text, time.monotonic() - began]))
"""


@pytest.mark.parametrize(
    ("fake", "flags", "nbytes", "text"),
    [
        ({}, [], 4_000_000_000, "4.0 GB"),
        ({"FAKE_INIT": "9"}, [], 0, ""),  # the driver is not loaded
        ({"FAKE_HANG": "1"}, [], 0, ""),  # a GPU does not answer
        ({}, ["-DOLD"], 0, ""),
        (None, [], 0, ""),
    ],
    ids=["two GPUs", "no driver", "it hangs", "an old driver", "no library"],
)
def test_a_rank_is_shown_with_its_memory_on_all_gpus(fake, flags, nbytes, text, tmp_path):
    path = tmp_path / "libnvidia-ml.so.1"
    if fake is not None:
        compile_library(NVML, path, *flags)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOK],
        env=job_environment({"LD_LIBRARY_PATH": str(tmp_path)} | (fake or {})),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, shown, seconds = json.loads(done.stdout)
    assert (found, shown) == (nbytes, text), done
    assert seconds < 60
