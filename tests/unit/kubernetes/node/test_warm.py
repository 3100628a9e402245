"""Which runs have use for a pod that has imported torch before, and what becomes of one that can't help."""

from dataclasses import replace

import pytest

from kit.values import run_plan
from torchmuster.core import proc
from torchmuster.core.model.plan import NodeSetup, ScriptKind, StartMethod
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.proc import importable
from torchmuster.kubernetes.node.warm import has_use, variables_of_workers
from torchmuster.multirun.server.messages import fork_order
from torchmuster.multirun.server.modules import changed_variables, read_by_imports
from torchmuster.multirun.server.remote import PodForkServer

PLAN = run_plan(2, target="train.py", cwd="/code", workers_per_node=(2,))


def test_a_script_that_may_be_forked_has_use_for_it():
    assert has_use(PLAN)


@pytest.mark.parametrize(
    "given",
    [
        {"start": StartMethod.FRESH},
        {"kind": ScriptKind.COMMAND},
        {"preload": ("mine",)},  # it has not come yet
        {"has_torch": False},
    ],
)
def test_programs_that_begin_otherwise_have_none(given):
    assert not has_use(replace(PLAN, program=replace(PLAN.program, **given)))


def test_a_node_that_is_set_up_first_has_none():
    assert not has_use(replace(PLAN, node_setup=NodeSetup(lines=("module load x",))))
    assert not has_use(replace(PLAN, preflight="only"))


def test_the_variables_are_those_with_which_an_agent_is_asked_for():
    plan = replace(PLAN, node_setup=NodeSetup(environment=(("NCCL_DEBUG", "INFO"),)))
    pod = {"PATH": "/bin", "PYTHONPATH": "/mine", "MUSTER_HOME": "/home"}
    ours = variables_of_workers(plan, pod, "/root")
    called = {**pod, "PYTHONPATH": importable("/mine", "/root"), "PWD": "/x", "MUSTER_WARM": "7 /w"}
    order = fork_order(plan, AgentOrder(run_dir="/r", place=1, head=("h:1",)), called)
    asked = {**order.environment, **order.added}
    read = {*ours, *asked}
    assert changed_variables(read_by_imports(ours, read), read_by_imports(asked, read)) == []
    assert (ours["OMP_NUM_THREADS"], ours["PYTHONPATH"]) == ("1", "/mine:/root")


def test_a_process_that_has_gone_is_not_waited_for(tmp_path):
    child = proc.start(["true"])
    assert child.wait(60.0) == 0
    assert not PodForkServer(f"{child.pid} {tmp_path}").wait_open()


def test_a_door_that_never_opens_is_given_up_with_its_process(tmp_path):
    child = proc.start(["sleep", "0.2"])
    assert not PodForkServer(f"{child.pid} {tmp_path}").wait_open()
    assert child.wait(60.0) == 0
