"""Faults of a node: memory, disks, limits, what one node lacks, mounts that stop, ends from outside."""

import errno

from kit import missing
from lab.live import making
from lab.live.case import CAREFUL, NAMES, PYTHON, fault, train
from lab.live.faults_program import IMPATIENT, explained, muster_run, says, trained
from lab.netlab import Host

APART = (Host("n1", hosts=NAMES), Host("n2", hosts=NAMES, shared=False))
MEMORY_BYTES = 700 << 20
SUMMARY = "Root Cause (first"  # what torchrun says at its end


def folder_of(bench, name):
    """Return a folder in HOME: the same path on every host, and each has its own."""
    return f"{bench.lab.home}/{name}"


# Files and programs that one node lacks.


@fault("package-missing", quick=True)
def one_node_lacks_a_package(bench):
    package = making.home(bench, "n1") / "packages" / "ourmodel.py"
    package.parent.mkdir(exist_ok=True)
    package.write_text("")
    path = folder_of(bench, "packages")
    before = f"sys.path.insert(0, {path!r})\nimport ourmodel"
    return explained(bench, before=before, until=SUMMARY)


@fault("package-missing", hosts=(CAREFUL[0], Host("n2", hosts=NAMES, python="/usr/bin/python3")))
def one_node_has_a_python_without_torch(bench):
    return bench.doctor("--python", "python3")


@fault("script-missing", quick=True, hosts=APART)
def one_node_lacks_the_script(bench):
    bench.script.write_text(train())
    return bench.explain(bench.torchrun(until="can't open file"))


@fault("script-missing", quick=True, hosts=APART)
def one_node_lacks_the_script_before_the_job(bench):
    bench.script.write_text(train())
    return bench.doctor("--script", str(bench.script))


@fault("scripts-differ", hosts=APART)
def nodes_have_different_scripts(bench):
    bench.script.write_text(train())
    (bench.lab.root("n2") / "shared" / bench.script.name).write_text(train(steps=9))
    return bench.doctor("--script", str(bench.script))


@fault("file-missing")
def one_node_lacks_the_data(bench):
    (making.home(bench, "n1") / "data.bin").write_bytes(b"1234")
    reading = f"if step == 0: open({folder_of(bench, 'data.bin')!r}).close()"
    return explained(bench, "No such file or directory", at_step=reading, until=SUMMARY)


@fault("command-missing", quick=True, hosts=(CAREFUL[0], Host("n2", hosts=NAMES, python="none")))
def one_node_has_no_torchrun(bench):
    bench.script.write_text(train())
    line = f"torchrun {' '.join(bench.usual())} {bench.script}"
    return bench.explain(bench.together(["sh", "-c", line], until="not found"))


TORCH = "__version__ = '2.2.1'\ndebug = False\ncuda = None\nhip = None\n"


@fault("torch-versions-differ", quick=True)
def one_node_has_another_torch(bench):
    for host in bench.lab.hosts:
        environment = making.home(bench, host) / "env"
        (environment / "torch").mkdir(parents=True, exist_ok=True)
        path = f"{folder_of(bench, 'env')}:" if host == "n2" else ""
        (environment / "torch" / "version.py").write_text(TORCH)
        (environment / "torch" / "__init__.py").write_text(
            "from torch.version import __version__\n"
        )
        (environment / "python").write_text(
            f'#!/bin/sh\nPYTHONPATH={path}$PYTHONPATH exec {PYTHON} "$@"\n'
        )
        (environment / "python").chmod(0o755)
    return bench.doctor("--python", folder_of(bench, "env/python"))


@fault("wrong-library")
def one_node_finds_an_empty_libstdc(bench):
    library = making.home(bench, "n2") / "lib" / "libstdc++.so.6"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"")
    bench.script.write_text(train())
    path = f"LD_LIBRARY_PATH={folder_of(bench, 'lib')}"
    before = ("sh", "-c", f'test $(uname -n) = n1 || export {path}; exec "$@"', "-")
    return bench.explain(bench.torchrun(before=before, until="libstdc++"))


# Disks and limits.


@fault("disk-full")
def disk_is_full_at_the_snapshot(bench):
    path = folder_of(bench, "snapshots")
    saving = f"if RANK == 1 and step == 2: torch.save(torch.ones(1 << 20), {path + '/last.pt'!r})"
    with making.disk(bench, "n2", path, "size=1m"):
        return explained(bench, at_step=saving, until=SUMMARY)


@fault("disk-full", quick=True)
def disk_of_the_runs_is_full(bench):
    with making.disk(bench, "n2", folder_of(bench, ".muster"), "size=4m"):
        return bench.doctor()


@fault("not-started")
def folder_of_the_runs_is_read_only(bench):
    with making.disk(bench, "n2", folder_of(bench, ".muster"), "ro"):
        told = bench.doctor()
    assert "n2" in told.text
    assert "Read-only file system" in told.text
    return told


@fault("read-only")
def output_folder_is_read_only(bench):
    path = folder_of(bench, "output")
    with making.disk(bench, "n2", path, "ro"):
        return explained(
            bench, at_step=f"if RANK == 1: open({path + '/log'!r}, 'w')", until=SUMMARY
        )


LOADING = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.ones(1 << 18)
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=4)
"""


@fault("small-dev-shm")
def shared_memory_is_too_small_for_the_loader(bench):
    making.done(bench, "n2", "mount", "-o", "remount,size=2m", "/dev/shm")
    try:
        return explained(bench, before=LOADING, at_step="if step == 1: list(loader)")
    finally:
        making.done(bench, "n2", "mount", "-o", "remount,size=50%", "/dev/shm")


@fault("small-dev-shm")
def shared_memory_is_small_before_the_job(bench):
    making.done(bench, "n2", "mount", "-o", "remount,size=8m", "/dev/shm")
    try:
        return bench.doctor()
    finally:
        making.done(bench, "n2", "mount", "-o", "remount,size=50%", "/dev/shm")


@fault("open-files")
def one_rank_opens_too_many_files(bench):
    opening = "if RANK == 1 and step == 2: kept = [open(os.devnull) for _ in range(400)]"
    bench.script.write_text(train(at_step=opening))
    before = ("sh", "-c", 'ulimit -n 300; exec "$@"', "-")
    return bench.explain(bench.torchrun(before=before))


@fault("too-few-files")
def limit_of_open_files_is_low(bench):
    with making.open_files_limit(bench, "n2", 512):
        return bench.doctor()


@fault("permission")
def output_belongs_to_somebody_else(bench):
    writing = f"if step == 1: open({str(bench.lab.home) + '/log'!r}, 'w')"
    bench.script.write_text(train(at_step=writing))
    before = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    files = bench.torchrun(before=before)
    says(files, "Permission denied")
    return bench.explain(files)


# Memory.


@fault("memory")
def address_space_is_limited(bench):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))"
    return explained(
        bench, "llocate memory", before=limited, at_step="if RANK == 1: torch.empty(3 << 30)"
    )


GROWING = "if RANK == 1 and step == 2:\n    kept = [bytearray(1 << 24) for _ in range(100)]"


def needs_groups():
    """Skip the test where no control group can be made; see `missing.stop`."""
    if (reason := making.may_limit_memory()) is not None:
        missing.stop(reason)


@fault("out-of-memory")
def memory_of_the_job_runs_out(bench):
    needs_groups()
    bench.script.write_text(train(at_step=GROWING))
    with making.memory_limit(bench, "n2", MEMORY_BYTES):
        told = bench.muster("--max-restarts", "0", "--tee", "none", str(bench.script))
    assert "SIGKILL" in told.text
    return told


@fault("out-of-memory")
def job_gets_too_little_memory(bench):
    needs_groups()
    with making.memory_limit(bench, "n2", MEMORY_BYTES):
        return bench.doctor()


SHRINKING = """
import mmap
if RANK == 1 and step == 2:
    with open(PATH, "wb") as file:
        file.truncate(1 << 16)
    with open(PATH, "r+b") as file:
        seen = mmap.mmap(file.fileno(), 0)
        os.truncate(PATH, 0)
        seen[0]
"""


@fault("bus-error")
def file_shrinks_under_one_rank(bench):
    path = folder_of(bench, "mapped")
    return explained(bench, "exitcode: -7", before=f"PATH = {path!r}", at_step=SHRINKING.strip())


# Mounts that stop.


def read_from_a_mount(bench, error):
    """Train with data on a mount of n2 that answers with an error."""
    path = folder_of(bench, "data")
    making.done(bench, "n1", "mkdir", "-p", path)
    reading = f"if RANK == 1 and step == 2: open({path + '/part-1'!r}).read()"
    with making.dead_mount(bench, "n2", path, error):
        return trained(bench, at_step=reading)


@fault("disk-error", hosts=CAREFUL)
def storage_answers_with_errors(bench):
    return bench.explain(read_from_a_mount(bench, errno.EIO))


@fault("stale-file", hosts=CAREFUL)
def file_on_the_network_was_replaced(bench):
    return bench.explain(read_from_a_mount(bench, errno.ESTALE))


@fault("mount-lost", hosts=CAREFUL)
def client_of_a_mount_has_died(bench):
    path = folder_of(bench, "data")
    with making.dead_mount(bench, "n2", path) as server:
        server.kill()
        server.wait()
        files = trained(bench, at_step=f"if RANK == 1 and step == 2: open({path + '/part-1'!r})")
    return bench.explain(files)


@fault("rank-missing-in-collective", hosts=CAREFUL)
def mount_stops_answering_in_training(bench):
    path = folder_of(bench, "data")
    making.done(bench, "n1", "mkdir", "-p", path)
    reading = f"if RANK == 1 and step == 60: open({path + '/part-1'!r}).read()"
    bench.script.write_text(train(at_step=reading, steps=100, timeout_s=600))
    with making.dead_mount(bench, "n2", path):
        told = bench.muster(*IMPATIENT, str(bench.script))
    assert "rank 1 stood still" in told.text
    return told


@fault("file-system-hangs", hosts=CAREFUL)
def mount_of_the_script_stops_answering(bench):
    path = folder_of(bench, "project")
    for host in (bench.lab.controller, "n1"):
        (making.home(bench, host) / "project").mkdir()
        (making.home(bench, host) / "project" / "train.py").write_text(train())
    with making.dead_mount(bench, "n2", path):
        return bench.doctor("--script", f"{path}/train.py")


# Ends from outside.

LEAVE = "if RANK == {rank} and step == 5: os.kill(-1, 9)"


@fault("node-failed")
def head_dies_in_training(bench):
    return muster_run(bench, "--max-restarts", "0", "--tee", "none", at_step=LEAVE.format(rank=0))


@fault("node-failed")
def other_node_dies_in_training(bench):
    return muster_run(bench, "--max-restarts", "0", "--tee", "none", at_step=LEAVE.format(rank=1))


# What slurmstepd does at the limit: SIGTERM to all of the step, and its line in the job's output.
LIMITED = """
"$@" & job=$!
until grep -q "step 3" said; do sleep 0.1; done
echo "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT $(date +%FT%T) DUE TO TIME LIMIT ***"
kill -TERM $job; wait $job
"""


@fault("time-limit")
def time_of_the_job_is_over(bench):
    waiting = "if step == 3: open('said', 'w').write('step 3')\nif step > 3: time.sleep(0.5)"
    bench.script.write_text(train(at_step=waiting, steps=100))
    before = ("sh", "-c", LIMITED, "-")
    return bench.explain(bench.torchrun(before=before))


@fault("cancelled")
def launcher_gets_sigterm(bench):
    leaving = "if RANK == 1 and step == 4: os.kill(os.getppid(), 15); time.sleep(30)"
    return explained(bench, "SIGTERM", at_step=leaving)
