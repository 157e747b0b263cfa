"""The example on MNIST's files, and going on from its checkpoints on other ranks."""

from pathlib import Path

import pytest
from harness import run_job
from mnist_files import write_zipped_mnist

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_cnn.py"


def run(n, tmp_path, *arguments):
    options = ["--data-dir", tmp_path / "mnist", "--checkpoints", tmp_path / "run", "--goal", "0"]
    job = run_job(n, EXAMPLE, *options, *arguments, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    return [line for line in job.output.splitlines() if line.startswith("epoch")]


@pytest.mark.at_length
def test_it_trains_on_files_of_mnist_and_goes_on_after_the_last_epoch(tmp_path):
    (tmp_path / "mnist").mkdir()
    write_zipped_mnist(tmp_path / "mnist", n=10)
    first = run(2, tmp_path, "--epochs", "2")
    assert [line[:9] for line in first] == ["epoch  1/", "epoch  2/"]
    then = run(1, tmp_path, "--epochs", "3")
    assert [line[:9] for line in then] == ["epoch  3/"]


@pytest.mark.at_length
@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "first-of"])
def test_a_plain_script_trains_on_the_parameter_server(mode, tmp_path):
    example = EXAMPLE.with_name("ps_digits.py")
    job = run_job(3, example, "--mode", mode, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output  # it asserts an accuracy
    assert f"2 workers, mode {mode}: accuracy 9" in job.output


@pytest.mark.at_length
def test_a_folder_without_the_files_says_which_it_misses(tmp_path):
    job = run_job(1, EXAMPLE, "--data-dir", tmp_path, cwd=tmp_path, timeout_s=120)
    assert job.code == 1
    assert "FileNotFoundError" in job.output
    assert "train-images-idx3-ubyte.gz" in job.output
