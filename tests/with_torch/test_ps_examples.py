"""The examples of the parameter server run and reach what they assert; restarts end alike."""

import re
from pathlib import Path

import pytest
from harness import IS_MPICH, at_length, run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
EASY = ("--goal", 0.9)  # it trains for less than by default


def run(n, name, *arguments, cwd, **launch):
    job = run_job(n, EXAMPLES / name, *arguments, cwd=cwd, timeout_s=120, **launch)
    assert job.code == 0, job.output
    return job.output


@pytest.mark.parametrize("n", at_length([3, 4], [3]))
def test_a_sparse_linear_model_beats_the_majority(n, tmp_path):
    epochs = at_length(4, 2)
    assert "accuracy" in run(n, "ps_sparse_linear.py", "--epochs", epochs, cwd=tmp_path)


@pytest.mark.parametrize("n", at_length([2, 3, 4], [3]))
def test_embeddings_of_nodes_foretell_edges(n, tmp_path):
    assert "by the communities 0.859; 2,000 rows" in run(n, "ps_graph.py", cwd=tmp_path)


@pytest.mark.at_length  # a job takes 5 s of a core
@pytest.mark.parametrize("n", [3, 4, 5])
def test_a_stream_is_learnt_while_an_evaluator_says_how_well(n, tmp_path):
    output = run(n, "ps_online.py", cwd=tmp_path)
    assert f"{n - 2} workers: " in output
    assert "of what can be known, says rank" in output


@pytest.mark.at_length
@pytest.mark.parametrize("n", [2, 3, 4])
def test_embeddings_recommend_better_than_popularity(n, tmp_path):
    epochs = at_length(20, 3)
    assert "recall@10" in run(n, "ps_recommender.py", "--epochs", epochs, cwd=tmp_path)


@pytest.mark.at_length
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_language_model_beats_bigrams(n, tmp_path):
    steps = at_length(150, 30)
    assert "nats per character" in run(n, "ps_text.py", "--steps", steps, cwd=tmp_path)


@pytest.mark.at_length  # a job takes 3 s, and test_ps_deaths.py has one in the gate
@pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")
def test_a_server_dies_and_nothing_is_lost_but_time(tmp_path):
    launch = {"options": ("--with-ft", "ulfm"), "env": {"RINGCOMM_ELASTIC": "1"}}
    output = run(5, "ps_failover.py", "--checkpoints", tmp_path / "saves", cwd=tmp_path, **launch)
    assert output.count("were made twice, and all 2000 values are as without") == 2


# --- the classic cluster ------------------------------------------------------------------------
@pytest.mark.at_length
def test_the_classic_cluster_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    pytest.importorskip("sklearn", reason="an extra: pip install 'ringcomm[examples]'")
    saved = tmp_path / "run"
    first = run(4, "ps_roles.py", "--steps", 100, "--checkpoints", saved, *EASY, cwd=tmp_path)
    assert "workers 2, servers 1, evaluators 1, steps 100: accuracy 9" in first
    assert "step 100: accuracy 9" in first  # the evaluator has reported
    then = run(4, "ps_roles.py", "--steps", 150, "--restore", saved, *EASY, cwd=tmp_path)
    assert "goes on at step 100" in then
    whole = run(4, "ps_roles.py", "--steps", 150, *EASY, cwd=tmp_path)
    assert fingerprint(then) == fingerprint(whole) != fingerprint(first)


@pytest.mark.at_length
@pytest.mark.parametrize("how", ["--restore", "--pretrained"])
def test_other_ranks_begin_with_what_was_saved(how, tmp_path):
    pytest.importorskip("sklearn", reason="an extra: pip install 'ringcomm[examples]'")
    saved = tmp_path / "run"
    first = run(3, "ps_roles.py", "--steps", 100, "--checkpoints", saved, *EASY, cwd=tmp_path)
    steps = 100 if how == "--restore" else 0
    then = run(7, "ps_roles.py", "--steps", steps, how, saved, *EASY, cwd=tmp_path)
    assert fingerprint(then) == fingerprint(first)


@pytest.mark.at_length
def test_the_classic_cluster_has_four_servers_eight_workers_and_an_evaluator(tmp_path):
    pytest.importorskip("sklearn", reason="an extra: pip install 'ringcomm[examples]'")
    said = run(13, "ps_roles.py", cwd=tmp_path)
    assert "workers 8, servers 4, evaluators 1, steps 300: accuracy 9" in said


def fingerprint(output):
    (found,) = re.findall(r"parameters ([0-9a-f]{8})", output)
    return found
