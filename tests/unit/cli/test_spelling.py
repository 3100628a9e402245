import pytest

from torchmuster.cli.spelling import hint_for_option

KNOWN = ["--nodes", "--nproc-per-node", "--max-restarts", "--on", "--tee", "--detach"]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--nproc_per_node", "it is spelled `--nproc-per-node`"),
        ("-nodes", "it is spelled `--nodes`"),
        ("--node", "did you mean `--nodes`?"),
        ("--max-restart", "did you mean `--max-restarts`?"),
        ("--frobnicate", None),
        ("--foo", None),
        ("-x", None),
    ],
)
def test_what_was_meant_is_guessed_only_when_it_is_near(given, hint):
    assert hint_for_option(given, KNOWN) == hint


def test_torchrun_s_word_gets_ours():
    assert "here it is `--nodes`" in hint_for_option("--nnodes", KNOWN)


def test_what_is_not_needed_here_is_said_to_be_so():
    assert "leave it out" in hint_for_option("--rdzv_backend", KNOWN)
