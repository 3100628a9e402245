"""The GPU kit on pretended devices: every check passes there, every check can fail, and one that hangs is ended."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kit.command import SOURCE, muster_env, ran, spawned
from kit.tables import words
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.gpucheck import conduct, results, table
from torchmuster.gpucheck import kit as device
from torchmuster.gpucheck.kit import FailedError, ImpossibleError, Kit
from torchmuster.gpucheck.table import BENCH, CHECKS, CORRECTNESS
from torchmuster.launcher.files.code_copy import package_files

KIT = (sys.executable, "-m", "torchmuster.gpucheck")
PACKAGE = SOURCE / "torchmuster" / "gpucheck"
# What no pretended device can show.
NOT_HERE = {"tools.top", "tools.doctor", "nccl.gpus", "nccl.nodes", "devices.mig"}
TRAINS = tuple(f"train.{k}" for k in ("plain", "bf16", "fp16", "dropout", "fsdp", "compile"))
# The word of GPUCHECK_BREAK -> the checks at which what they look at goes wrong then.
BROKEN_BY = {
    "backend": ["devices.shared"],
    "device": ["devices.by-rank"],
    "differs": ["tools.verify"],
    "duplicate": ["nccl.refuses"],
    "early": ["fork.early"],
    "fault": ["faults.address", "faults.assert", "faults.memory", "hang.kernel"],
    "first": ["snapshots.10-gb", "snapshots.device"],
    "forgets": ["snapshots.memory", *TRAINS],
    "forked": ["fork.questions"],
    "hang": ["hang.collective"],
    "held_above": ["fork.child"],
    "is_pinned": ["fork.pinned"],
    "killed": ["bench.gpt", "bench.recovery"],
    "last": ["snapshots.costs"],
    "loaded": ["faults.kill"],
    "log": ["faults.xid"],
    "nan": ["tools.replay"],
    "refusal": ["devices.too-many"],
    "step": ["bench.step"],
    "total": words(
        "bench.start-1 bench.start-2 bench.start-8 fork.compile fork.graph gloo.shares nccl.alone"
    ),
    "visible": ["devices.uuid", "tools.per-gpu"],
}
BREAKS = {name: word for word, names in BROKEN_BY.items() for name in names}
IN_PROCESS = {"devices.lists", *NOT_HERE}
MORE = {"devices.by-rank": {"GPUCHECK_PRETEND_GPUS": "2"}}


@pytest.fixture
def pretend(tmp_path):
    """Return the variables of a machine with one pretended GPU."""
    folder = tmp_path / "devices"
    folder.mkdir()
    return muster_env(tmp_path / "home", GPUCHECK_PRETEND=str(folder), GPUCHECK_SEED="1")


def run_kit(env, *words, limit_s=1700):
    return ran([*KIT, *words], limit_s=limit_s, env=env)


def checks_of(path):
    return json.loads(path.read_text())["checks"]


@pytest.mark.timeout(1800)
@pytest.mark.lab
@pytest.mark.parametrize("part", [CORRECTNESS, BENCH])
def test_every_check_passes_on_a_pretended_device(pretend, tmp_path, part):
    out = tmp_path / "out.json"
    ended = run_kit(pretend, "--part", part, "--out", out)
    found = checks_of(out)

    outcomes = {name: one["outcome"] for name, one in found.items()}
    assert "failed" not in outcomes.values(), ended.stdout
    impossible = {name for name, word in outcomes.items() if word == "not possible here"}
    assert impossible == (NOT_HERE if part == CORRECTNESS else set())
    assert set(found) == {check.name for check in CHECKS if check.part == part}
    assert ended.returncode == 0
    assert os.listdir(pretend["GPUCHECK_PRETEND"]) == []


def test_every_check_has_a_way_to_make_it_fail():
    assert set(BREAKS) | IN_PROCESS == {check.name for check in CHECKS}


# Checks that are broken in one way are tried by the first of them in CI; `train.plain` stands for all trainings.
FIRST = {word: min(names) for word, names in BROKEN_BY.items()} | {"forgets": TRAINS[0]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.lab)
        for name in sorted(BREAKS)
    ],
)
def test_a_check_fails_when_what_it_looks_at_is_wrong(pretend, tmp_path, name):
    out = tmp_path / "out.json"
    env = {**pretend, "GPUCHECK_BREAK": BREAKS[name], **MORE.get(name, {})}
    ended = run_kit(env, "--only", name, "--out", out)

    assert checks_of(out)[name]["outcome"] == "failed", ended.stdout
    assert checks_of(out)[name]["evidence"]
    assert ended.returncode == 1


# Those that look at what only a real machine has.


def make_kit(tmp_path, **machine):
    return Kit(machine=device.GpuMachine(**machine), scratch=str(tmp_path))


MEMORY = {"memory_bytes": 80 << 30, "used_bytes": 3 << 30}
GPU = device.Gpu(index=0, uuid="GPU-1", name="NVIDIA H100", **MEMORY)


def test_a_list_of_devices_that_is_read_wrong_fails(tmp_path, monkeypatch):
    kit = make_kit(tmp_path, gpus=(GPU,))
    table.schedulers_lists(kit)
    monkeypatch.setattr(table, "visible_gpus", lambda variables: ["0"])
    with pytest.raises(FailedError, match="is read as"):
        table.schedulers_lists(kit)


def test_columns_that_differ_from_nvidia_smi_fail():
    table.expect_use(3100, 3072)
    with pytest.raises(FailedError, match="nvidia-smi 3072"):
        table.expect_use(0, 3072)
    machine = device.GpuMachine(gpus=(GPU,), driver="580.1")
    node = {"num_gpus": 1, "gpu": "NVIDIA H100", "driver": "580.1"}
    table.expect_gpus({"nodes": [node]}, machine)
    for wrong in ({"num_gpus": 2}, {"gpu": None}, {"driver": "535"}):
        with pytest.raises(FailedError, match="nvidia-smi NVIDIA H100"):
            table.expect_gpus({"nodes": [node | wrong]}, machine)


def test_a_wrong_sum_over_gpus_or_nodes_and_a_part_without_a_rank_fail(tmp_path, monkeypatch):
    class Wrong:
        def all(self, name):
            return [1.0]

        def ranks(self, name):
            return {}

        def expect(self, holds, what):
            if not holds:
                raise FailedError(what)

    monkeypatch.setattr(Kit, "muster", lambda *_, **__: Wrong())
    kit = make_kit(tmp_path, gpus=(GPU, GPU))
    with pytest.raises(FailedError):
        table.nccl_over_gpus(kit)
    with pytest.raises(ImpossibleError):
        table.nccl_over_nodes(kit)
    monkeypatch.setattr(table, "find_own_job", lambda: type("Job", (), {"nodes": "ab"}))
    with pytest.raises(FailedError):
        table.nccl_over_nodes(kit)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with pytest.raises(FailedError):
        table.parts_of_gpus(kit)


# The conduct.


def test_a_check_that_hangs_is_ended_and_the_next_begins(pretend, tmp_path, monkeypatch, capsys):
    for name, value in pretend.items():
        monkeypatch.setenv(name, value)
    by_name = {check.name: check for check in CHECKS}
    chosen = [replace(by_name["hang.kernel"], limit_s=0.1), by_name["faults.xid"]]
    out = tmp_path / "out.json"
    first, second = conduct.conduct(chosen, device.look(), str(out))

    assert (first.outcome, first.evidence) == ("failed", "no result: it hangs: ended after 1 s")
    assert second.outcome == "passed"
    assert running("scripts/use.py") + running("scripts/train.py") == []


def test_a_device_that_is_held_afterwards_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCHECK_PRETEND", str(tmp_path))
    monkeypatch.setattr(conduct, "_EMPTY_S", 0.2)
    (tmp_path / f"0-{os.getpid()}").touch()
    machine = device.look()

    assert "is not empty afterwards" in conduct._what_is_left(machine, [0])
    assert conduct._what_is_left(machine, [1]) == ""


def test_several_calls_add_to_one_file_and_the_newest_result_counts(pretend, tmp_path):
    out = tmp_path / "results"
    run_kit({**pretend, "GPUCHECK_BREAK": "log"}, "--only", "faults.xid", "--out", out)
    run_kit(pretend, "--only", "faults.xid", "--out", out)
    run_kit(pretend, "--only", "devices.mig", "--out", out)
    (path,) = out.glob("*.json")
    whole = json.loads(path.read_text())

    outcomes = {name: (one["outcome"], one["call"]) for name, one in whole["checks"].items()}
    assert outcomes == {"faults.xid": ("passed", 1), "devices.mig": ("not possible here", 2)}
    told = whole["calls"][0]
    assert told["gpus"] == ["a pretended GPU (the processor), 0 GiB"]
    assert {"driver", "torch", "python", "commit", "time"} <= set(told)
    assert "| faults.xid |" in path.with_suffix(".md").read_text()


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    env = muster_env(tmp_path / "home")
    out = tmp_path / "out.json"
    ended = run_kit(env, "--only", "nccl", "--out", out)
    if device.look().gpus:
        pytest.skip("this machine has a GPU")

    assert {one["outcome"] for one in checks_of(out).values()} == {"not possible here"}
    assert "needs 1 GPU: the kernel shows no NVIDIA device" in ended.stdout
    assert "0 passed, 0 failed" in ended.stdout


def test_a_mistyped_check_and_a_foreign_file_are_refused(pretend, tmp_path):
    ended = run_kit(pretend, "--only", "nonsense")
    assert ended.returncode == 2
    assert "no check is named `nonsense`" in ended.stderr
    foreign = tmp_path / "plan.json"
    foreign.write_text("[]")
    ended = run_kit(pretend, "--only", "faults.xid", "--out", foreign)
    assert (ended.returncode, foreign.read_text()) == (2, "[]")
    assert "this is no file of results" in ended.stderr


# The sentence of the README, and the size.


def test_the_sentence_says_what_ran_what_failed_and_what_did_not_run():
    call = {"gpus": ["NVIDIA H100, 79 GiB"], "torch": "2.14.1", "time": "2026-12-01T"}
    result = {"seconds": 1.0, "evidence": "", "measures": {}, "call": 0}
    outcomes = {check.name: "passed" for check in CHECKS}
    outcomes |= {"nccl.gpus": "not possible here", "hang.kernel": "failed"}
    found = {name: {**result, "name": name, "outcome": word} for name, word in outcomes.items()}
    whole = {"calls": [{**call, "driver": "580.1"}], "checks": found}
    num = len(CHECKS) - 2

    assert results.summary(whole) == (
        f"**Run on GPUs** (NVIDIA H100, 79 GiB, torch 2.14.1, 2026-12-01): {num} checks passed;"
        " 1 failed (hang.kernel); not run: nccl.gpus"
    )
    some = {name: one for name, one in found.items() if name.startswith("train.")}
    assert results.summary({**whole, "checks": some}).endswith(
        f"; {len(CHECKS) - len(some)} not run"
    )
    for driver in ("", "pretended"):
        whole["calls"][0]["driver"] = driver
        assert "Not yet run on a GPU" in results.summary(whole)
    assert "Not yet run on a GPU" in results.summary(None)


def test_the_readme_says_what_the_newest_file_says():
    root = SOURCE.parent
    sentence = results.summary(results.newest(str(root / "benchmarks" / "results" / "gpu")))

    text = " ".join((root / "README.md").read_text().split())
    assert sentence in text


def test_the_kit_is_small_and_stays_on_its_machine():
    num = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    assert num <= 2000
    names = [name for name, _ in package_files(proc.PACKAGE_FOLDER) if "gpucheck" in name]
    assert {name.rpartition("/")[2] for name in names} <= {"__init__.py"}


# A kit that is stopped.


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_kit_that_is_stopped_leaves_nothing_running(pretend, tmp_path, signum, code):
    env = {**pretend, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    kit = spawned([*KIT, "--only", "hang.kernel", "--out", tmp_path / "out.json"], env=env)
    mine = str(tmp_path)
    wait_until(lambda: any(mine in line for line in running("scripts/train.py")), "a worker")
    kit.send_signal(signum)
    said, _ = kit.communicate(timeout=180)

    assert kit.returncode == code
    assert "Traceback" not in said
    wait_until(lambda: not any(mine in line for line in running("")), "the end of all it began")
    if signum != signal.SIGKILL:
        assert os.listdir(tmp_path / "tmp") == []


def running(word):
    """Return the command lines and variables of all processes whose command line has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in line and int(path.name) != os.getpid():
            found.append((line + variables).decode(errors="replace"))
    return found


def test_results_that_can_not_be_written_are_refused(pretend):
    ended = run_kit(pretend, "--only", "devices.mig", "--out", "/proc/nowhere/x.json")
    assert ended.returncode == 2
    assert "error: the results can't be written" in ended.stderr
    assert "Traceback" not in ended.stderr
