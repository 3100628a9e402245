import time

import pytest

from torchmuster.core.model.text import did_you_mean


@pytest.mark.parametrize(
    ("word", "near"),
    [("comand", "command"), ("exit_actions", "exitActions"), ("VOLUME-MOUNTS", "volumeMounts")],
)
def test_a_near_miss_is_found_in_spite_of_case_and_hyphens(word, near):
    known = ["name", "command", "exitActions", "volumeMounts"]

    assert did_you_mean(word, known) == f"did you mean `{near}`?"


def test_without_a_near_miss_the_other_hint_is_given():
    assert did_you_mean("zzz", ["name"], "one of: name") == "one of: name"
    assert did_you_mean("zzz", ["name"]) is None


def test_a_near_miss_among_many_names_is_found_at_once():
    names = [f"worker-{i}" for i in range(20_000)]
    began = time.process_time()

    assert did_you_mean("worker_19999", names) is not None
    assert did_you_mean("x" * 100_000, names) is None
    assert time.process_time() - began < 3  # it takes 5 ms; a comparison with each name, a minute
