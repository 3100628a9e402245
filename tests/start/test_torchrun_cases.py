"""`muster torchrun` from its command line, case by case as PyTorch's own launcher tests drive torchrun.

Source of the cases: test/distributed/launcher/test_run.py of torch 2.13. Left out are those that put a mock into torch's
launcher (an agent that raises, a rendezvous that counts its shutdowns, accelerators that are not there): they test torch's
insides. Left out, too, are `is_not_torchelastic_launched`, which starts plain python and no launcher, and `virtual_local_rank`,
which compares code compiled for two GPUs.
"""

import json
import os
import shlex
import socket
import sys
import uuid

import pytest

from kit.command import MUSTER, ran
from start.launching import LIMIT_S, end

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}

# Says of each worker what it was given; needs no torch.
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
told = {name: os.environ.get(name) for name in names}
told["argv"] = sys.argv[1:]
told["signals"] = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
told["muster"] = sorted(name for name in os.environ if name.startswith("MUSTER_"))
with open(os.path.join(os.environ["TOLD"], f"{os.getpid()}.json"), "w") as file:
    json.dump(told, file)
"""


def meeting_at(port):
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")


# What torchrun does when nothing names a meeting.


@pytest.mark.short
def test_two_plain_lines_run_on_one_machine_at_the_same_time(launch):
    meet = """
import os, sys, time
mark = os.path.join(os.environ["TOLD"], os.environ["TORCHELASTIC_RUN_ID"])
open(mark, "w").close()
deadline = time.monotonic() + 60
while len(os.listdir(os.environ["TOLD"])) < 2:  # both jobs' workers run at once
    if time.monotonic() > deadline:
        sys.exit("the other job never came")
    time.sleep(0.05)
"""
    script = launch.script(meet)

    both = [launch.begin("--nproc-per-node", "2", script) for _ in range(2)]

    assert [end(process).returncode for process in both] == [0, 0]
    for path in (launch.folder / "told").iterdir():
        assert str(uuid.UUID(path.name)) == path.name


@pytest.mark.parametrize("options", [(), ("--master-port", "{port}"), ("--standalone",)])
def test_a_worker_gets_no_variable_and_no_scratch_folder_of_ours(launch, port, options):
    words = [word.format(port=port) for word in options]

    assert launch.run(*words, launch.script(TELL)).returncode == 0
    assert launch.told()[0]["muster"] == ["MUSTER_HOME"]


def test_a_port_that_something_else_has_taken_is_an_error_at_once_where_one_node_is_all(launch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        options = ("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
        done = launch.run(*options, launch.script(TELL))

    assert done.returncode == 2
    assert f"(pid {os.getpid()}) listens there" in done.stderr


# test_init_method_tcp_with_torchelastic: the script calls torch's store at the port of the line.


def test_a_script_may_name_the_port_of_the_line_as_its_store_in_every_attempt(launch, port):
    pytest.importorskip("torch", reason="it is torch's store")
    script = launch.script("""
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
dist.destroy_process_group()
""")
    master = ("--master-addr=localhost", f"--master-port={port}", "--max-restarts=1")
    url = f"tcp://localhost:{port}"

    done = launch.run("--nnodes=1", "--nproc-per-node=2", *master, script, url)

    assert done.returncode == 0, done.stderr


# Restarts are counted, as by torchrun.

RECOVERS = """
import os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt)
if attempt < 2:
    %s
"""


@pytest.mark.parametrize("fails", ["raise ValueError(0)", "undefined_name"])
def test_a_script_that_recovers_on_the_third_attempt_succeeds(launch, fails):
    text = RECOVERS % fails
    done = launch.run("--max-restarts", "3", launch.script(text))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["attempt 0", "attempt 1", "attempt 2"]


def test_exit_code_75_is_a_failure_that_spends_a_restart(launch):
    script = launch.script(
        "import os\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\nos._exit(75)"
    )
    done = launch.run("--max-restarts", "1", script)

    assert done.returncode == 1
    assert done.stdout.split() == ["0", "1"]


# The other cases of PyTorch's test_run.py.


@pytest.mark.parametrize(
    ("meeting", "job"),
    [
        (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=job-7"), "job-7"),
        (("--master-addr=localhost", "--master-port={port}", "--node-rank=0"), "none"),
    ],
)
@pytest.mark.short
def test_each_worker_runs_the_script_with_torchruns_variables(launch, port, meeting, job):
    """launch_user_script_python, _caffe2_bc: the name of the job, its numbers, and one thread each."""
    options = ("--nnodes=1", "--nproc-per-node=4", *(word.format(port=port) for word in meeting))

    done = launch.run(*options, "--monitor-interval=1", "--start-method=spawn",
        launch.script(TELL), "--epochs=3", "x")  # fmt: skip

    assert done.returncode == 0, done.stderr
    told = launch.told()
    assert [one["RANK"] for one in told] == ["0", "1", "2", "3"]
    assert {(one["WORLD_SIZE"], one["TORCHELASTIC_RUN_ID"]) for one in told} == {("4", job)}
    assert {one["OMP_NUM_THREADS"] for one in told} == {"1"}
    assert {one["signals"] for one in told} == {"SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
    assert told[0]["argv"] == ["--epochs=3", "x"]


def test_the_whole_line_may_come_from_the_environment(launch, port):
    """launch_with_env_vars, and launch_user_script_bash: PET_*, --no-python."""
    script = launch.script(f"#!{sys.executable}\n{TELL}", "tell")
    os.chmod(script, 0o755)
    env = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_RDZV_ID": "job-8",
        "PET_MONITOR_INTERVAL": "1",
        "PET_START_METHOD": "spawn",
        "PET_NO_PYTHON": "1",
        "PET_MODULE": "0",
        "OMP_NUM_THREADS": "3",
    }

    assert launch.run(script, "a", **env).returncode == 0
    told = launch.told()
    assert [(one["RANK"], one["argv"], one["OMP_NUM_THREADS"]) for one in told] == [
        ("0", ["a"], "3"),
        ("1", ["a"], "3"),
    ]


@pytest.mark.parametrize("number", ["cpu", "auto"])
def test_standalone_with_a_path_an_automatic_number_and_macros(launch, number):
    """launch_standalone, launch_run_path, nproc_launch_auto_configurations, macros in arguments."""
    done = launch.run("--standalone", "--run-path", f"--nproc-per-node={number}", launch.script(TELL),
        "$local_rank", "${local_rank}-$$", "$local_ranks", **NO_GPUS)  # fmt: skip

    assert done.returncode == 0, done.stderr
    told = launch.told()
    assert len(told) == len(os.sched_getaffinity(0)), (
        "as torch counts: those that this process may use"
    )
    for one in told:
        rank = one["LOCAL_RANK"]
        assert one["argv"] == [rank, f"{rank}-$", "$local_ranks"]
        assert str(uuid.UUID(one["TORCHELASTIC_RUN_ID"])) == one["TORCHELASTIC_RUN_ID"]


def test_an_elastic_line_with_quoted_conf_runs_where_fewer_nodes_come(launch, port):
    """launch_elastic: `1:2` nodes of which one comes."""
    options = ("--nnodes=1:2", "--nproc-per-node=2", *meeting_at(port))
    conf = "--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'"

    done = launch.run(*options, conf, "--max-restarts=0", launch.script(TELL))

    assert done.returncode == 0, done.stderr
    assert {one["WORLD_SIZE"] for one in launch.told()} == {"2"}


def test_a_worker_that_raises_fails_the_elastic_launch(launch, port):
    """launch_elastic_worker_raise_exception."""
    options = ("--nnodes=1:2", "--nproc-per-node=1", *meeting_at(port))
    conf = "--rdzv-conf='join_timeout=60,last_call_timeout=1,timeout=5'"

    done = launch.run(*options, conf, "--max-restarts=0", launch.script("raise ValueError('no')"))

    assert done.returncode == 1
    assert "ValueError: no" in done.stderr


def test_the_address_of_another_machine_is_named_where_node_0_is(launch, port):
    options = ("--nnodes=2", "--node-rank=0", "--master-addr=192.0.2.1", f"--master-port={port}")

    done = launch.run(*options, "--rdzv-conf=join_timeout=1", launch.script(TELL))

    assert done.returncode != 0
    assert "192.0.2.1 is no address of this machine, and the others look for" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "confs"),
    [("2", ("is_host=1", "is_host=0")), ("1:2", ("timeout=5", "timeout=5"))],
)
def test_several_agents_of_one_machine_make_one_world(launch, port, nodes, confs):
    """launch_elastic_multiple_agents."""
    options = (f"--nnodes={nodes}", "--nproc-per-node=2", *meeting_at(port))
    script = launch.script(TELL)

    both = [launch.begin(*options, f"--rdzv_conf={conf}", script) for conf in confs]

    assert [end(process).returncode for process in both] == [0, 0]
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in launch.told()] == [
        ("0", "4"), ("1", "4"), ("2", "4"), ("3", "4"),
    ]  # fmt: skip


def test_ranks_are_assigned_by_role(launch, port):
    """local_elastic_agent_test.py: correct_rank_assignment_heterogeneous."""
    options = ("--nnodes=3", *meeting_at(port))
    script, roles = launch.script(TELL), (("ps", 1), ("trainer", 2), ("ps", 3))

    agents = [
        launch.begin(*options, f"--role={role}", f"--nproc-per-node={num}", script)
        for role, num in roles
    ]

    assert [end(process).returncode for process in agents] == [0, 0, 0]
    told = launch.told()
    for role, size in (("ps", 4), ("trainer", 2)):
        mine = [one for one in told if one["ROLE_NAME"] == role]
        assert [one["ROLE_RANK"] for one in mine] == [str(n) for n in range(size)]
        assert {one["ROLE_WORLD_SIZE"] for one in mine} == {str(size)}


READ = """
import os, sys
text = sys.stdin.read() if sys.stdin is not None else "none"
open(os.path.join(os.environ["TOLD"], os.environ["RANK"]), "w").write(text)
"""


@pytest.mark.parametrize("given", ["a pipe", "a file", "nothing"])
def test_workers_read_what_torchrun_would_give_them(launch, given):
    told, text = launch.folder / "told", "cfg\n"
    (launch.folder / "given.txt").write_text(text)
    argv = [*MUSTER, "torchrun", "--nproc-per-node=1", launch.script(READ)]
    redirected = {"a pipe": "cat given.txt |", "a file": "< given.txt", "nothing": "<&-"}[given]
    line = shlex.join(argv)
    line = f"{redirected} {line}" if given == "a pipe" else f"{line} {redirected}"
    told.mkdir()
    env = {**os.environ, "MUSTER_HOME": str(launch.folder / "home"), "TOLD": str(told)}
    assert ran(["sh", "-c", line], LIMIT_S, cwd=launch.folder, env=env).returncode == 0
    assert (told / "0").read_text() == ("" if given == "nothing" else text)


@pytest.mark.parametrize(
    ("redirected", "said"),
    [("< given.txt", True), ("< /dev/null", False), ("--stdin 0 < given.txt", False)],
)
def test_muster_run_says_where_nobody_reads_standard_input(launch, redirected, said):
    script = launch.script("import sys; print('got', repr(sys.stdin.read()))")
    (launch.folder / "given.txt").write_text("cfg\n")
    options, _, given = redirected.rpartition("<")
    line = f"{shlex.join(MUSTER)} run --here {options} {script} < {given}"
    env = {**os.environ, "MUSTER_HOME": str(launch.folder / "home"), "MUSTER_ON": "local"}
    done = ran(["sh", "-c", line], LIMIT_S, cwd=launch.folder, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("got 'cfg\\n'\n" if options else "got ''\n")
    assert ("no worker reads standard input here; `--stdin 0` gives it" in done.stderr) == said


@pytest.mark.parametrize("start", ["fork", "fresh"])
def test_a_command_may_be_as_long_as_the_system_lets_it_be(launch, start):
    words = [f"/data/set/{number:0100}.tar" for number in range(11_000)]
    options = () if start == "fork" else ("--no-python", sys.executable)

    done = launch.run("--nproc-per-node=1", *options, launch.script(TELL), *words)

    assert done.returncode == 0, done.stderr[-2000:]
    assert launch.told()[0]["argv"] == words


def test_a_package_that_refuses_to_come_after_torch_gets_a_fresh_interpreter(launch):
    package = "import sys\nif 'torch' in sys.modules:\n    raise ImportError('torch came first')\n"
    (launch.folder / "early").mkdir()
    launch.script(package, "early/__init__.py")

    done = launch.run(launch.script("import early, torch"))

    assert done.returncode == 0, done.stderr
    assert "not forked: early wants to be imported before torch" in done.stderr


@pytest.mark.parametrize(("way", "note"), [("fresh", False), ("fork", False), ("frsh", True)])
def test_a_line_may_say_how_workers_are_started(launch, way, note):
    forked = (
        "import sys; assert ('torch' in sys.modules) == (sys.argv[1] == 'fork')\nif 0: import torch"
    )
    done = launch.run(f"--start={way}", launch.script(forked), way)
    assert (done.returncode, "is not a way to start workers" in done.stderr) == (
        (2, True) if note else (0, False)
    ), done.stderr


def test_where_the_home_cant_be_written_the_run_is_in_the_temporary_folder(launch):
    own = launch.folder / "tmp" / f"muster-{os.getuid()}"
    own.parent.mkdir()
    env = {"HOME": "/proc/nowhere", "MUSTER_HOME": "", "TMPDIR": str(own.parent)}

    done = launch.run("--nproc-per-node=1", launch.script(TELL), **env)

    assert done.returncode == 0, done.stderr
    told = (
        f"/proc/nowhere/.muster can't be written: the files of the run are below MUSTER_HOME={own}"
    )
    assert told in done.stderr
    assert [*own.glob("runs/*-script-*/result.json")]
    own.chmod(0o777)  # somebody else may have made it
    assert "the run directory can't be written" in launch.run(launch.script(TELL), **env).stderr


def test_what_a_script_sets_before_its_imports_counts(launch, tmp_path):
    text = """
import logging.config, os, tempfile
os.environ["TMPDIR"] = os.environ["TOLD"]
import torch
assert tempfile.gettempdir() == os.environ["TOLD"], tempfile.gettempdir()
"""
    early = text.replace("import torch", 'logging.config.dictConfig({"version": 1})\nimport torch')
    early += 'assert not logging.getLogger("torch").disabled\n'
    for number, script in enumerate((text, early)):
        done = launch.run(launch.script(script, f"s{number}.py"))
        assert done.returncode == 0, done.stderr
    assert "the script calls dictConfig in line 4, before its imports" in done.stderr


def test_streams_are_kept_and_shown_with_torchruns_prefix(launch):
    """capture_logs_using_default_logs_specs: the template of the prefix, and a log of each rank."""
    script = launch.script("import os\nif os.environ['RANK'] == '0':\n    print('here')\n")
    logs = launch.folder / "logs"
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}-${local_rank}-${rank}]:"}

    done = launch.run(
        "--standalone", "--nproc-per-node=2", f"--log-dir={logs}", "--redirect=3", "--tee=3", script,
        **template,
    )  # fmt: skip

    assert done.stdout == "[default-0-0]:here\n"
    (attempt,) = logs.glob("*/attempt_0")
    kept = {str(path.relative_to(attempt)): path.read_text() for path in attempt.glob("*/*.log")}
    assert kept == {
        "0/stdout.log": "here\n", "0/stderr.log": "", "1/stdout.log": "", "1/stderr.log": "",
    }  # fmt: skip


def test_an_empty_template_switches_the_prefix_off(launch):
    script = launch.script("import os\nprint('here', os.environ['RANK'])\n")

    done = launch.run("--nproc-per-node=2", script, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="")

    assert sorted(done.stdout.splitlines()) == ["here 0", "here 1"]


@pytest.mark.parametrize(
    "options",
    [
        ("--nproc-per-node=unknown",),
        ("--nproc-per-node=gpu",),
        ("--logs-specs=unknown",),
        ("--nnodes=2:1",),
        ("--nnodes=2:20:30",),
        ("--no-python", "--module"),
    ],
)
def test_what_torchrun_refuses_is_refused(launch, options):
    """nproc_launch_unknown_configurations, logs_logs_spec_entrypoint_must_be_defined, min_max_nodes_parse, ..._bash."""
    assert launch.run(*options, launch.script(TELL), **NO_GPUS).returncode == 2
    assert launch.told() == []


@pytest.mark.parametrize(
    "options", [("--logs_specs=default",), ("--master-addr=localhost", "--master-port={port}")]
)
def test_torch_says_that_it_was_launched_elastically(launch, port, options):
    """is_torchelastic_launched, ..._with_logs_spec_defined, init_method_env: and the group meets by the environment."""
    pytest.importorskip("torch", reason="it is torch that says so")
    script = launch.script("""
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo", init_method="env://")
assert dist.get_world_size() == 2
dist.barrier()  # else one may go while the other still connects
dist.destroy_process_group()
""")

    words = [word.format(port=port) for word in options]
    done = launch.run("--run-path", "--nnodes=1", "--nproc-per-node=2", *words, script)

    assert done.returncode == 0, done.stderr


def test_a_failure_is_told_in_torchruns_json_beside_the_logs_and_for_who_started_the_launcher(
    launch,
):
    logs, told = launch.folder / "logs", launch.folder / "told.json"
    script = launch.script(
        "import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('boom')\n"
    )

    done = launch.run("--standalone", "--nproc-per-node=2", f"--log-dir={logs}", "--redirects=3", script,
        TORCHELASTIC_ERROR_FILE=str(told))  # fmt: skip

    assert done.returncode == 1
    message = json.loads(told.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("RuntimeError: boom", 1)
    assert "boom" in message["extraInfo"]["py_callstack"]
    (kept,) = logs.glob("*/attempt_0/1/error.json")
    assert kept.read_text() == told.read_text()


def test_an_agent_of_another_job_is_refused_by_name_and_one_without_a_job_is_not(launch, port):
    options = ("--nnodes=2", *meeting_at(port), "--no-spread")
    script = launch.script(TELL)

    head = launch.begin(*options, "--rdzv-conf=is_host=1", script, PBS_JOBID="1053[1].s")
    other = launch.run(*options, "--rdzv-conf=is_host=0", script, PBS_JOBID="1053[2].s")
    by_ssh = launch.run(*options, "--rdzv-conf=is_host=0", script)

    assert (end(head).returncode, by_ssh.returncode, other.returncode) == (0, 0, 8)
    assert "it is of job 1053[2].s, and the run at this address is of job 1053[1].s" in other.stderr
