"""`muster torchrun` from its command line, case by case as PyTorch's own launcher tests drive torchrun.

Source of the cases: test/distributed/launcher/test_run.py of torch 2.13. Left out are those that put a mock into torch's
launcher (an agent that raises, `multiprocessing.Process` that counts, `torch.cuda.is_available`): they test torch's insides.
"""

import os
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
LIMIT_S = 120

# Says of each worker what it was given; needs no torch.
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
told = {name: os.environ.get(name) for name in names}
told["argv"] = sys.argv[1:]
told["muster"] = sorted(name for name in os.environ if name.startswith("MUSTER_"))
with open(os.path.join(os.environ["TOLD"], f"{os.getpid()}.json"), "w") as file:
    json.dump(told, file)
"""


@dataclass
class Launch:
    """One `muster torchrun`."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def begin(self, *words: str, **env: str) -> subprocess.Popen:
        (self.folder / "told").mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "MUSTER_"))}
        kept.pop("OMP_NUM_THREADS", None)
        ours = {
            "PYTHONPATH": SOURCE,
            "MUSTER_HOME": str(self.folder / "home"),
            "TOLD": str(self.folder / "told"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "torchmuster", "torchrun", *words],
            env={**kept, **ours, **self.env, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        return end(self.begin(*words, **env))

    def told(self) -> list[dict]:
        import json

        found = [json.loads(path.read_text()) for path in (self.folder / "told").iterdir()]
        return sorted(found, key=lambda told: int(told["RANK"]))


def end(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it does not end\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


# What torchrun does when nothing names a meeting.


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
