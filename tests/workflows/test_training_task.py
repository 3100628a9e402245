"""A training task: what the death of each process on its node means (docs/design.md, rule 30)."""

import os
import signal

import pytest

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

TASK = """
workflow:
  name: fit
  tasks:
  - name: t
    nodes: 2
    nproc_per_node: 1
    script: train.py
    exitActions: {RESCHEDULE: '137'}
"""
# The first life of each rank waits; each notes the attempt of the run that it is part of.
SCRIPT = """
import os, time
name = os.path.join(os.path.dirname(__file__), "began-" + os.environ["RANK"])
is_first = not os.path.exists(name)
with open(name, "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
time.sleep(60 if is_first else 0)
"""
RUN_GOES_ON, TASK_BEGINS_AGAIN = "0\n1\n", "0\n0\n"


@pytest.mark.parametrize(
    ("words", "lives", "attempts"),
    [
        (("\0agent\0", "--place=0"), RUN_GOES_ON, 1),
        (("\0agent\0", "--place=1"), RUN_GOES_ON, 1),
        pytest.param(("\0training-task\0",), TASK_BEGINS_AGAIN, 2, marks=pytest.mark.lab),
        pytest.param(("\0task\0", "--task=t"), TASK_BEGINS_AGAIN, 2, marks=pytest.mark.lab),
        (("\0group\0", "--listen-fd"), TASK_BEGINS_AGAIN, 2),
    ],
    ids=["head of the run", "agent", "owner of the run", "agent of the task", "head of the group"],
)
def test_the_death_of_a_process_costs_what_it_should(
    start_workflow, tmp_path, words, lives, attempts
):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = start_workflow(TASK)
    for rank in "01":
        run.wait_for_file(f"began-{rank}")
    before = set(run.processes())
    (victim,) = run.pids(*words)
    os.kill(victim, signal.SIGKILL)

    assert run.wait() == 0, run.out
    assert (tmp_path / "began-0").read_text() == lives
    assert run.attempts("t-group", "t") == attempts
    assert not before & set(run.processes()), "nothing of the first life is left"
