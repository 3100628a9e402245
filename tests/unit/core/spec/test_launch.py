import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.plan import Limits, ScriptKind, StartMethod, Tee
from torchmuster.core.spec import launch
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError

GPUS = ("0", "1", "2", "3")


@pytest.fixture
def problems():
    return Problems()


@pytest.fixture
def planned(tmp_path, problems):
    (tmp_path / "train.py").write_text("")

    def plan(gpus=(), simulated=True, **given):
        options = launch.RunRequest(**{"script": "train.py", "cwd": str(tmp_path), **given})
        return launch.plan_run(options, "r", gpus, problems, simulated=simulated)

    return plan


def what(problems):
    return [problem.what for problem in problems.found]


def test_the_defaults_are_one_worker_on_one_node_and_three_restarts(planned, tmp_path):
    plan = planned()

    assert (plan.min_nodes, plan.max_nodes, plan.workers_per_node) == (1, 1, (1,))
    assert plan.limits == Limits(
        max_restarts=3, grace_s=30.0, join_timeout_s=600.0, last_call_s=2.0
    )
    assert plan.node_names == ("n1",)
    assert (plan.program.kind, plan.program.python) == (ScriptKind.FILE, (sys.executable,))
    assert (plan.program.cwd, plan.program.start) == (str(tmp_path), StartMethod.AUTO)
    assert (plan.tee, plan.stdin_rank, plan.grow) == (Tee.RANK_0, None, False)


def test_every_option_reaches_the_plan(planned):
    plan = planned(
        nodes="1:3",
        nproc_per_node="2",
        max_restarts=7,
        grace="5s",
        join_timeout="1m",
        last_call="500ms",
        grow=True,
        start="fresh",
        preload=("numpy",),
        tee="all",
        stdin_rank=5,
        args=("--epochs", "3"),
    )

    assert (plan.min_nodes, plan.max_nodes, plan.workers_per_node) == (1, 3, (2,))
    assert plan.limits == Limits(max_restarts=7, grace_s=5.0, join_timeout_s=60.0, last_call_s=0.5)
    assert (plan.grow, plan.tee, plan.stdin_rank) == (True, Tee.ALL, 5)
    assert (plan.program.start, plan.program.preload) == (StartMethod.FRESH, ("numpy",))
    assert plan.program.args == ("--epochs", "3")
    assert plan.node_names == ("n1", "n2", "n3")


def test_variables_of_the_command_line_reach_the_workers(planned):
    setup = planned(set_env=("A=1", "B=x=y")).node_setup

    assert setup.environment == (("A", "1"), ("B", "x=y"))


def test_another_active_environment_is_named_where_muster_s_own_has_no_torch(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    active = {"VIRTUAL_ENV": str(tmp_path)}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"the environment {tmp_path} is active" in launch.other_environment(active)
    assert (
        launch.other_environment({}) == launch.other_environment({"VIRTUAL_ENV": sys.prefix}) == ""
    )
    assert launch.other_environment({"CONDA_PREFIX": str(tmp_path / "gone")}) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert launch.other_environment(active) == ""


@pytest.mark.parametrize(
    ("gpus", "given", "problem"),
    [
        ((), {"script": "-"}, "a script can't come from standard input"),
        (
            GPUS,
            {"nodes": "2", "nproc_per_node": "3"},
            "2 simulated nodes ask for 6 GPUs, this machine has 4",
        ),
        ((), {"set_env": ("RANK=8", "A=1")}, "muster sets `RANK` itself, in each worker"),
        ((), {"set_env": ("WORLD_SIZE=8",)}, "muster sets `WORLD_SIZE` itself, in each worker"),
    ],
)
def test_what_can_t_be_is_one_problem(planned, problems, gpus, given, problem):
    assert planned(gpus, **given) is None
    assert what(problems) == [problem]


@pytest.mark.parametrize("rank", [-1, 4, 99])
def test_standard_input_can_t_go_to_a_rank_that_never_is(planned, problems, rank):
    assert planned(nodes="1:2", nproc_per_node="2", stdin_rank=rank) is None
    assert what(problems) == [f"there is no rank {rank} among 4 workers"]


def test_a_module_needs_no_file(planned):
    assert planned(module=True, script="no.such.module").program.kind is ScriptKind.MODULE


@pytest.mark.parametrize(
    ("gpus", "given", "workers"),
    [
        pytest.param(GPUS, {}, (4,), id="one on each gpu"),
        pytest.param(GPUS, {"nodes": "2"}, (2,), id="simulated nodes share the gpus"),
        pytest.param((), {"nodes": "2", "nproc_per_node": "4,2"}, (4, 2), id="others on each node"),
        pytest.param(GPUS, {"nproc_per_node": "8"}, (8,), id="many on few gpus of one node"),
    ],
)
def test_the_number_of_workers_follows_from_gpus_nodes_and_what_is_asked_for(
    planned, gpus, given, workers
):
    assert planned(gpus, **given).workers_per_node == workers


@pytest.mark.parametrize("text", [None, "gpu", "auto", "4"])
def test_real_nodes_have_gpus_of_their_own(planned, text):
    plan = planned(GPUS, simulated=False, nodes="2", nproc_per_node=text)
    assert plan.workers_per_node == (4,)


def test_all_problems_are_found_at_once(planned, problems):
    plan = planned(
        script="trian.py",
        nodes="3:2",
        nproc_per_node="0",
        max_restarts=-1,
        grace="soon",
        join_timeout="never",
        last_call="-1",
        python="/no/such/python",
    )

    assert plan is None
    assert what(problems) == [
        "`3:2` asks for at least 3 and at most 2 nodes",
        "a node needs at least 1 worker",
        "the interpreter does not exist or can't be executed",
        "the script does not exist",
        "`soon` is not a valid duration",
        "`never` is not a valid duration",
        "`-1` is not a valid duration",
        "a number of restarts can't be negative",
    ]


@pytest.mark.parametrize(
    ("script", "meant"),
    [("trian.py", "train.py"), ("main.py", "src/main.py"), ("src/mian.py", "src/main.py")],
    ids=["a near miss", "of that name a folder below", "a near miss in another folder"],
)
def test_a_script_that_may_be_meant_is_suggested(planned, problems, tmp_path, script, meant):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("")

    planned(script=script)

    assert problems.found[0].fix == f"did you mean `{meant}`?"


@pytest.mark.skipif(os.getuid() == 0, reason="root can read every file")
def test_a_script_that_can_t_be_read_is_refused(planned, problems, tmp_path):
    (tmp_path / "train.py").chmod(0)

    assert planned() is None
    assert what(problems) == ["the script can't be read"]


@pytest.mark.parametrize(
    ("text", "nodes"), [("1", (1, 1)), ("2:4", (2, 4)), ("3:3", (3, 3)), ("007", (7, 7))]
)
def test_numbers_of_nodes_are_read(text, nodes, problems):
    assert launch.parse_nodes(text, "--nodes", problems) == nodes


@pytest.mark.parametrize(
    "text", ["", "x", "0", "0:2", "3:2", "1:", ":2", "1:2:3", "-1", "1.5", "²", "65537", "1:99999"]
)
def test_what_is_no_number_of_nodes_is_one_problem(text, problems):
    assert launch.parse_nodes(text, "--nodes", problems) is None
    assert len(problems.found) == 1


@given(st.text(st.characters(categories=["N"]) | st.sampled_from(":-, "), max_size=6))
def test_any_text_is_a_number_of_nodes_or_a_problem(text):
    problems = Problems()

    assert (launch.parse_nodes(text, "--nodes", problems) is None) == bool(problems.found)


@pytest.mark.parametrize(
    ("text", "gpus", "workers"),
    [
        ("4", (), (4,)),
        ("4,2", (), (4, 2)),
        ("gpu", GPUS, (4,)),
        ("auto", GPUS, (4,)),
        ("auto", (), (len(os.sched_getaffinity(0)),)),
        ("cpu", GPUS, (len(os.sched_getaffinity(0)),)),
        ("gpu,1", GPUS, (4, 1)),
    ],
)
def test_numbers_of_workers_are_read(text, gpus, workers, problems):
    assert launch.parse_workers(text, gpus, problems) == workers


@pytest.mark.parametrize(
    "text", ["", "0", "2,0", "-1", "x", "4,", "1.5", "²", "4097", "gpu", "gpus"]
)
def test_what_is_no_number_of_workers_is_one_problem(text, problems):
    assert launch.parse_workers(text, (), problems) is None
    assert len(problems.found) == 1


def test_the_interpreter_may_have_flags(problems):
    assert launch.find_python(f"{sys.executable} -X utf8", problems) == (
        sys.executable,
        "-X",
        "utf8",
    )


def test_the_interpreter_is_found_on_the_path(problems, monkeypatch):
    folder, name = os.path.split(sys.executable)
    monkeypatch.setenv("PATH", folder)

    assert launch.find_python(name, problems) == (sys.executable,)


@pytest.mark.parametrize("text", ["", "/no/such/python", "/tmp", "python'", "no-such-python -u"])
def test_a_missing_interpreter_is_one_problem(text, problems):
    assert launch.find_python(text, problems) is None
    assert what(problems) == ["the interpreter does not exist or can't be executed"]


@pytest.mark.parametrize(
    ("text", "least_s", "most_s", "blind_s"),
    [
        (None, 60.0, 1800.0, 300.0),
        ("off", 0.0, 1800.0, 300.0),
        ("2m", 120.0, 1800.0, 120.0),
        ("2h", 7200.0, 7200.0, 7200.0),
        ("10s:5m", 10.0, 300.0, 10.0),
    ],
)
def test_the_hang_timeout_sets_the_least_and_the_most(problems, text, least_s, most_s, blind_s):
    limits = Limits(**launch.parse_hang_timeout(text, problems))
    assert (limits.hang_s, limits.hang_most_s, limits.hang_blind_s) == (least_s, most_s, blind_s)
    assert problems.found == []


@pytest.mark.parametrize("text", ["", "0", "soon", "5m:1m", "1m:2m:3m", "5m:", "-3"])
def test_a_hang_timeout_that_is_none_is_refused(problems, text):
    assert launch.parse_hang_timeout(text, problems) is None
    (problem,) = problems.found
    assert "--hang-timeout" in problem.where
    assert "off" in problem.fix


def test_debug_keeps_what_the_user_has_set():
    found = dict(launch.debug_environment({"NCCL_DEBUG": "WARN"}))
    assert "NCCL_DEBUG" not in found
    assert found["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert found["TORCHMUSTER_DEBUG"] == "1"


def test_a_script_that_starts_its_training_itself_is_told_of(tmp_path):
    script = tmp_path / "ddp.py"
    port = 'os.environ["MASTER_PORT"] = "12355"\n'
    script.write_text(f"import torch.multiprocessing as mp\n{port}mp.spawn(work, nprocs=2)\n")
    assert "ddp.py starts processes of its own (spawn in line 3)" in launch.own_processes(
        str(script)
    )
    with pytest.raises(UsageError, match="starts the processes of its training itself") as refused:
        launch.own_processes(str(script), refuses=True)
    assert (refused.value.where, "`python ddp.py`" in refused.value.fix) == (f"{script}:3", True)
    script.write_text(script.read_text() + 'if "RANK" in os.environ: work()\n')
    assert "spawn in line 3" in launch.own_processes(str(script), refuses=True)
    spawn = "mp.spawn(work)\n"
    for text in (port, spawn, f"# {port}{spawn}", f"{port}# {spawn}"):
        script.write_text(text)
        assert launch.own_processes(str(script)) == ""
    assert launch.own_processes(str(tmp_path / "none.py")) == ""


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("nb.ipynb", (), ("is a notebook", "nbconvert --to script nb.ipynb")),
        ("flow.yaml", (), ("is a YAML file", "muster submit flow.yaml")),
        ("torchrun", ("train.py",), ("another launcher", "muster torchrun train.py")),
    ],
)
def test_what_another_command_takes_is_named(tmp_path, problems, target, args, words):
    if target != "torchrun":
        (tmp_path / target).write_text("{}")
    launch.check_script(target, str(tmp_path), problems, args)
    (problem,) = problems.found
    said = f"{problem}\n{problem.explain_to_user()}"
    assert all(word in said for word in words), said


def test_the_folder_of_an_environment_is_no_interpreter(tmp_path, problems):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert launch.find_python(str(tmp_path), problems) is None
    (problem,) = problems.found
    assert problem.fix == f"--python {tmp_path}/bin/python"
