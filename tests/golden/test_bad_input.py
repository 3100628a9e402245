"""Every message on bad input, word for word: what the real program prints, and that it does nothing.

The sections of `bad_input/<topic>.txt` hold the command, what it printed on standard error, and its exit
code. `pytest tests/golden --update-golden` writes them again; read the difference as a user would.
"""

import os
import re
import shlex
import socket
import sys

import pytest

from kit.command import MUSTER, muster_env, ran
from kit.namespaces import small_disk, why_no_mount
from kit.transcripts import GOLDEN, read_sections

RUN_ID = re.compile(r"\d{8}-\d{6}-([A-Za-z0-9-]+)-[0-9a-f]{4}")

# Topic: name of the case: command line. Exit code 2 unless `EXIT_CODES` says another.
TOPICS = {
    "the_command": {
        "no_script": "run",
        "misspelled_command": "runn train.py",
        "unknown_command": "fly",
        "script_as_command": "train.py",
        "argument_too_many": "ps train.py",
        "dev_without_a_script": "dev",
        "removed_command": "convert w.yaml",
    },
    "the_script": {
        "unknown_script_with_near_miss": "run trian.py --epochs 3",
        "unknown_script": "run prepare_data.py",
        "dev_of_an_unknown_script": "dev trian.py",
        "script_is_a_directory": "run data",
        "script_is_a_package": "run package",
    },
    "numbers": {
        "no_workers": "run --nproc-per-node 0 train.py",
        "spare_nodes_of_a_range": "run --nodes 2:4 --spares 1 train.py",
        "spare_nodes_below_zero": "run --spares -1 train.py",
        "more_spare_nodes_than_hosts": "run --hosts a,b --nodes 2 --spares 1 train.py",
        "negative_workers": "run --nproc-per-node -2 train.py",
        "no_number_of_workers": "run --nproc-per-node gpus train.py",
        "workers_for_other_nodes": "run --nodes 3 --nproc-per-node 4,2 train.py",
        "a_worker_on_each_gpu_without_gpus": "run --nproc-per-node gpu train.py",
        "no_nodes": "run --nodes 0 train.py",
        "dev_with_a_range_of_nodes": "dev --nodes 1:2 train.py",
        "nodes_the_wrong_way_round": "run --nodes 3:2 train.py",
        "no_number_of_nodes": "run --nodes two train.py",
        "too_many_nodes": "run --nodes 1000000 train.py",
        "negative_restarts": "run --max-restarts -1 train.py",
        "no_number_of_restarts": "run --max-restarts many train.py",
        "stdin_for_nobody": "run --nproc-per-node 2 --stdin 2 train.py",
        "a_dry_run_behind_the_script": "run --nodes 2 train.py --time 2h --dry-run",
        "minutes_that_are_seconds": "run --on slurm --time 20 train.py",
        "a_warning_before_the_start": "run --on slurm --time 4h --warn 5h train.py",
        "notices_to_nobody": "run --notify team train.py",
        "notices_to_an_address": "run --notify https://hooks.example.org/T0/secret train.py",
        "notices_to_a_missing_file": "run --notify @who train.py",
        "an_editor_for_nobody": "run --nproc-per-node 2 --debugpy 2 train.py",
    },
    "words": {
        "bad_durations": "run --grace soon --join-timeout 10x --last-call -3 train.py",
        "bad_choice": "run --tee some train.py",
        "pdb_without_a_terminal": "run --pdb train.py",
        "dev_with_pdb_without_a_terminal": "dev --pdb train.py",
        "debuggers_that_exclude_each_other": "run --pdb --debugpy --stdin 0 --detach train.py",
        "an_environment_for_simulated_nodes": "run --ship-env --python python3 train.py",
        "an_editor_in_the_background": "run --detach --debugpy train.py",
        "dev_where_no_session_can_be": "dev --on kubernetes --python /no/such/python train.py",
        "missing_interpreter": "run --python /no/such/python train.py",
        "interpreter_with_open_quotation": 'run --python "python -c \'x" train.py',
        "unknown_engine": "run --on slrum train.py",
        "bad_run_id": "run --run-id ../train train.py",
        "existing_run_directory": "run --run-id mine train.py",
        "several_mistakes_at_once": (
            "run --on slrum --run-id a/b --nodes 3:2 --nproc-per-node 0 --grace soon"
            " --max-restarts -3 --python nope trian.py"
        ),
    },
    "unknown_options": {
        "misspelled_option": "run --node 2 train.py",
        "misspelled_option_with_underscores": "run --nproc_per_nod 2 train.py",
        "a_number_of_gpus": "run --gpus 2 train.py",
        "slurm_s_gres": "run --gres gpu:2 train.py",
        "slurm_s_job_name": "run -J mine train.py",
        "a_name_that_no_job_can_have": "run --name 'a b' train.py",
        "a_variable_without_value": "run --env A train.py",
        "script_from_standard_input": "run -",
        "script_that_is_not_there_as_command": "trian.py --lr 1",
        "unknown_option": "run --frobnicate train.py",
        "dev_in_the_background": "dev --detach train.py",
        "option_of_another_command_of_a_group": "session list --name k1",
        "session_without_nodes": "session start --nodes 0",
        "two_names_for_one_session": "session end k1 --name k2",
        "unknown_short_option": "run -x train.py",
        "option_without_value": "run --nodes",
        "torchrun_s_endpoint": "run --rdzv_endpoint n1:29500 train.py",
        "torchrun_s_standalone": "run --standalone train.py",
        "torchrun_s_node_rank": "run --node_rank=1 train.py",
        "torchrun_s_start_method": "run --start-method fork train.py",
        "torchrun_s_log_dir": "run --log-dir logs train.py",
    },
    "unknown_runs": {
        "status_of_an_unknown_run": "status 20270101",
        "end_of_an_unknown_session": "session end --name k1",
        "dev_in_an_unknown_session": "dev --session nope train.py",
        "logs_of_an_unknown_run": "logs 20270101",
        "wait_for_an_unknown_run": "wait 20270101",
        "cancel_an_unknown_run": "cancel 20270101",
        "status_of_a_misspelled_run": "status digist-1",
        "status_of_an_ambiguous_run": "status digits",
        "status_of_nothing": "status ''",
        "status_of_a_folder_that_is_no_run": "status $TMP/work",
        "cancel_without_a_run": "cancel",
        "wait_for_a_run_whose_owner_has_gone": "wait mine",
        "logs_before_there_are_any": "logs mine",
        "logs_of_an_unknown_attempt": "logs --attempt 7 digits-1",
        "logs_of_an_unknown_rank": "logs --rank 7 digits-1",
        "logs_of_a_negative_rank": "logs --rank -1 digits-1",
    },
    "sweeps": {
        "sweep_without_values": "sweep train.py",
        "sweep_with_an_empty_grid": "sweep train.py --grid lr= seed=",
        "sweep_with_an_empty_range": "sweep train.py --grid seed=3:3",
        "sweep_with_a_name_twice": "sweep train.py --grid lr=1 lr=2",
        "sweep_with_a_value_twice": "sweep train.py --grid lr=1,2,1",
        "sweep_with_names_alike": "sweep train.py --grid a.b=1 a_b=2",
        "sweep_of_too_many": "sweep train.py --grid seed=0:1000000000 lr=1,2",
        "sweep_with_rows_of_other_length": "sweep train.py --zip lr=1,2 batch=32",
        "sweep_with_a_control_character": "sweep train.py --grid 'lr=1\t2'",
        "sweep_with_an_open_quotation": "sweep train.py --grid 'text=\"a b,c'",
        "sweep_with_a_bad_name": "sweep train.py --grid 2=1 'learning rate=1,2'",
        "sweep_with_an_option_of_the_script": "sweep train.py --grid lr=1,2 --epochs 3",
        "sweep_stops_by_nothing": "sweep train.py --grid lr=1,2 --stop asha",
        "sweep_with_an_unknown_rule": "sweep train.py --grid lr=1,2 --metric loss --stop ash",
        "sweep_with_a_rule_that_is_not_installed": (
            "sweep train.py --grid lr=1,2 --metric loss --stop asha"
        ),
        "sweep_with_a_rule_of_a_missing_module": (
            "sweep train.py --grid lr=1,2 --metric loss --stop nowhere:Rule"
        ),
        "sweep_with_several_mistakes": "sweep trian.py --grid lr seed=1:0 --grace soon --name 'a b'",
        "sweep_on_a_removed_engine": "sweep train.py --grid lr=1,2 --on torque",
        "sweep_in_pods_with_what_they_lack": "sweep train.py --grid lr=1,2 --on kubernetes --time 2h --per-gpu 2",
        "sweep_on_hosts": "sweep train.py --grid lr=1,2 --on ssh",
        "sweep_stops_jobs_early": "sweep train.py --grid lr=1,2 --on slurm --metric loss --stop asha --detach",
        "sweep_on_hosts_for_a_time": "sweep train.py --grid lr=1,2 --hosts a,b --time 2h",
        "sweep_with_a_removed_option": "sweep train.py --grid lr=1,2 --gpu-mem 8Gi",
        "sweep_in_no_slot": "sweep train.py --grid lr=1,2 --slots 0",
    },
    "torchrun": {
        "torchrun_without_script": "torchrun --nnodes 2",
        "torchrun_option_without_value": "torchrun --nnodes",
        "torchrun_misspelled_option": "torchrun --nproc_per_nodes 2 train.py",
        "torchrun_unknown_option": "torchrun --frobnicate train.py",
        "torchrun_unknown_script": "torchrun --nproc_per_node 2 trian.py",
        "torchrun_refused_options": (
            "torchrun --event-log-handler x --logs-specs x --numa-binding node"
            " --duplicate-stdout-filters x --duplicate-stderr-filters x train.py"
        ),
        "torchrun_numbers": (
            "torchrun --nnodes 3:2 --nproc_per_node 2,2 --max_restarts -1 --node_rank x train.py"
        ),
        "torchrun_no_workers": "torchrun --nproc_per_node 0 train.py",
        "torchrun_misspelled_workers": "torchrun --nproc_per_node gpus train.py",
        "torchrun_gpu_without_gpus": "torchrun --nproc_per_node gpu train.py",
        "torchrun_xpu": "torchrun --nproc_per_node xpu train.py",
        "torchrun_unknown_backend": "torchrun --rdzv_backend etcd-v2 train.py",
        "torchrun_empty_host": (
            "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint :29500 train.py"
        ),
        "torchrun_empty_master": "torchrun --nnodes 2 --node_rank 1 --master_addr '' train.py",
        "torchrun_bad_port": (
            "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint n1:295000 train.py"
        ),
        "torchrun_node_rank_outside": "torchrun --nnodes 2 --node_rank 2 train.py",
        "torchrun_streams_and_signals": (
            "torchrun -r x --tee 9 --local-ranks-filter a --signals-to-handle SIGFOO,SIGKILL train.py"
        ),
        "torchrun_durations": (
            "torchrun --shutdown-timeout x --rdzv_conf join_timeout=y,last_call_timeout=z,w train.py"
        ),
        "torchrun_module_and_command": "torchrun -m --no-python train.py",
        "torchrun_missing_secret": "torchrun --rdzv_conf secret_file=$TMP/work/none train.py",
        "torchrun_open_secret": "torchrun --rdzv_conf secret_file=$TMP/work/open_secret train.py",
        "torchrun_short_secret": "torchrun --rdzv_conf secret_file=$TMP/work/short_secret train.py",
    },
    "sessions": {
        "no_session": "run --session main train.py",
        "end_of_no_session": "session end big",
        "misspelled_session_command": "session strat",
        "session_with_bad_durations": "session start --idle soon --time 2x",
        "session_with_a_bad_name": "session start --name 'my session'",
        "session_in_pods": "session start --on kubernetes",
        "session_on_fewer_hosts": "session start --hosts a,b --nodes 3",
        "session_without_its_interpreter": "session start --python /no/such/python",
    },
}
COMMANDS = {name: (topic, line) for topic, lines in TOPICS.items() for name, line in lines.items()}
EXIT_CODES = {
    "end_of_an_unknown_session": 4,
    "dev_in_an_unknown_session": 4,
    "logs_before_there_are_any": 4,
    "logs_of_an_unknown_attempt": 4,
    "logs_of_an_unknown_rank": 4,
    "torchrun_missing_secret": 3,
    "wait_for_a_run_whose_owner_has_gone": 1,
    "no_session": 4,
    "end_of_no_session": 4,
    **{
        name: 4
        for name in COMMANDS
        if name.startswith(("status_of", "logs_of_an_unknown_run", "wait_for_an", "cancel_an"))
    },
}


@pytest.fixture
def place(tmp_path):
    """A working directory and a MUSTER_HOME with two runs, one of them without a living owner."""
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in ("data", "package"):
        (work / folder).mkdir(parents=True)
    for name in ("train.py", "package/__main__.py"):
        (work / name).write_text("raise SystemExit('this must never run')\n")
    (work / "optuna.py").write_text("raise ImportError(\"No module named 'optuna'\")\n")
    for name, mode, text in (("open_secret", 0o644, "ab" * 32), ("short_secret", 0o600, "ab")):
        (work / name).write_text(text)
        (work / name).chmod(mode)
    for name in ("digits-1", "digits-2", "mine"):
        (home / "runs" / name).mkdir(parents=True)
    logs = home / "runs" / "digits-1" / "logs" / "main" / "train" / "attempt-0"
    logs.mkdir(parents=True)
    for rank in (0, 1):
        (logs / f"rank-{rank}.log").write_text("a line\n")
    return tmp_path


def muster(place, words, *, before=(), **environment):
    """Run the real program and return how it ended."""
    # It writes no bytecode beside the module that stands for one that is missing.
    own = {"MUSTER_ON": "local", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    env = muster_env(place / "home", **{**own, **environment})
    return ran([*before, *MUSTER, *words], limit_s=60, cwd=place / "work", env=env)


def refused(place, shown, code, **options):
    """Run a command line that ends with this code, and see that it wrote nothing anywhere."""
    before = all_files(place)
    done = muster(place, shlex.split(shown.replace("$TMP", str(place))), **options)
    assert (done.returncode, done.stdout) == (code, "")
    assert all_files(place) == before
    return done


def transcript(place, shown, done):
    """Return what a golden file holds: command, standard error, exit code."""
    stderr = done.stderr.replace(str(place), "$TMP").replace(sys.executable, "$PYTHON")
    stderr = RUN_ID.sub(r"$TIME-\1-$RANDOM", stderr)
    return f"$ muster {shown}\n{stderr}exit {done.returncode}\n"


def all_files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_input_is_answered_in_these_words_and_nothing_is_done(name, place, golden):
    topic, shown = COMMANDS[name]
    done = refused(place, shown, EXIT_CODES.get(name, 2))
    golden(f"bad_input/{topic}.txt", name, transcript(place, shown, done))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_message_has_the_form_of_a_message(name):
    text = read_sections(f"bad_input/{COMMANDS[name][0]}.txt")[name]
    blocks = "".join(text.splitlines(keepends=True)[1:-1]).rstrip("\n").split("\n\n")

    for block in blocks:
        lines = block.split("\n")
        heads = [line.split(":")[0] for line in lines if not line.startswith("    ")]
        assert heads == [h for h in ("error", "  at", "  because", "hint") if h in heads]
        assert lines[0].startswith("error: ")
        assert not lines[0].endswith(".")
        assert len(lines) > 1, "an error alone helps nobody"


# Messages about the place rather than the words.

PLACES = "bad_input/places.txt"
OTHER_PLACES = {
    "home_that_can_t_be_made": ("run train.py", "/dev/null/x"),
    "home_with_a_file_in_the_way": ("run train.py", "$TMP/work/train.py"),
    "torchrun_home_that_can_t_be_made": ("torchrun --standalone train.py", "/dev/null/x"),
}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_a_home_that_can_t_be_used_is_an_error_before_anything_starts(name, place, golden):
    shown, home = OTHER_PLACES[name]
    done = refused(place, shown, 3, MUSTER_HOME=home.replace("$TMP", str(place)))
    golden(PLACES, name, transcript(place, f"{shown}  # MUSTER_HOME={home}", done))


def test_a_run_in_the_background_of_a_job_is_refused(place, golden):
    shown = "run --detach train.py"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    done = refused(place, shown, 2, **job)
    text = transcript(place, f"{shown}  # SLURM_JOB_ID=7", done)
    golden(PLACES, "run_in_the_background_of_a_job", text)


def test_a_full_disk_is_an_error_before_anything_starts(place, golden):
    if (reason := why_no_mount()) is not None:
        pytest.skip(reason)
    home = str(place / "home")
    nothing_left = '"$@"; code=$?; test -z "$(ls -A "$0/runs")" || exit 99; exit $code'
    before = [*small_disk(home, "64k"), "sh", "-c", nothing_left, home]

    done = muster(place, ["run", "--run-id", "full", "train.py"], before=before)

    assert (done.returncode, done.stdout) == (3, "")
    golden(PLACES, "home_on_a_full_disk", transcript(place, "run train.py", done))


def test_a_port_that_is_taken_is_an_error_of_the_head(place, golden):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        shown = "torchrun --nnodes 2 --node_rank 0 --master_port $PORT train.py"
        done = refused(place, shown.replace("$PORT", port), 2)
    text = transcript(place, shown, done).replace(port, "$PORT")
    text = re.sub(rf"because: .* \(pid {os.getpid()}\)", "because: $NAME (pid $PID)", text)
    golden(PLACES, "torchrun_port_taken", text)


def test_a_working_directory_that_is_gone_is_an_error(place, golden):
    shown = "run train.py"
    script = 'rm -r "$0" && exec "$@"'

    done = muster(place, shlex.split(shown), before=["sh", "-c", script, str(place / "work")])

    assert (done.returncode, done.stdout) == (2, "")
    text = transcript(place, f"{shown}  # in a folder that was removed", done)
    golden(PLACES, "working_directory_gone", text)


def test_colour_is_for_terminals_alone(place):
    assert "\x1b" not in muster(place, ["run", "trian.py"], TERM="xterm-256color").stderr


def test_no_case_is_left_over_from_a_message_that_is_gone():
    found = {
        path.stem: set(read_sections(f"bad_input/{path.name}"))
        for path in (GOLDEN / "bad_input").glob("*.txt")
    }

    assert found.pop("places") == OTHER_PLACES.keys() | {
        "run_in_the_background_of_a_job",
        "torchrun_port_taken",
        "working_directory_gone",
        "home_on_a_full_disk",
    }
    assert found == {topic: set(commands) for topic, commands in TOPICS.items()}
