"""examples/heat_equation.py: its result is the exact one, and its picture is one."""

import re
import zlib
from pathlib import Path

import numpy as np
from harness import above_mpi, run_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "heat_equation.py"


@above_mpi
def test_the_plate_cools_as_known_and_is_drawn(tmp_path):
    cells = "--cells", "46", "--steps", "30"
    jobs = [
        run_job(4, EXAMPLE, *cells, cwd=tmp_path),
        run_job(1, EXAMPLE, *cells, "--picture", "one.png", cwd=tmp_path),
        run_job(3, EXAMPLE, *cells, "--picture", "three.png", cwd=tmp_path),
    ]
    for job in jobs:
        assert job.code == 0, job.output
    assert "46 x 46 cells on 2 x 2 ranks" in jobs[0].output
    error = re.search(r"largest difference from the exact solution: (\S+)", jobs[0].output)
    assert float(error[1]) < 1e-12
    pictures = [pixels(tmp_path / name) for name in ("one.png", "three.png")]
    assert pictures[0].max() == 255
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


def pixels(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x2e\0\0\0\x2e\x08\x02")
    begin = data.index(b"IDAT")
    length = int.from_bytes(data[begin - 4 : begin])
    lines = np.frombuffer(zlib.decompress(data[begin + 4 :][:length]), np.uint8).reshape(46, -1)
    return lines[:, 1:].astype(int)
