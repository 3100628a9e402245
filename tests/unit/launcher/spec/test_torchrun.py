import os
import signal
import sys
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.cli.spelling import TORCHRUN_OPTIONS
from torchmuster.core.model.plan import Limits, RestartPolicy, ScriptKind
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.launcher.spec.torchrun import OURS, REFUSED, make_parser, parse_torchrun

NO_SCRIPT = (
    "muster torchrun --help; is a blank missing before a backslash?"
    " `muster lint JOBSCRIPT` finds it"
)


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def parse(line, environment=None, gpus=()):
    """Return what a line asks for; every problem is an error."""
    problems = Problems()
    found = parse_torchrun(line.split(), environment or {}, gpus, problems)
    assert problems.found == []
    return found


def problems_of(line, environment=None):
    problems = Problems()
    assert parse_torchrun(line.split(), environment or {}, (), problems) is None
    return problems.found


def torchruns_parser():
    run = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
    return run.get_args_parser()


def spellings(parser):
    return {text for action in parser._actions for text in action.option_strings}


def test_every_option_of_torchrun_is_known_in_every_spelling():
    assert spellings(make_parser({})) >= spellings(torchruns_parser())


def test_no_option_but_ours_is_taken_that_torchrun_does_not_have():
    extra = spellings(make_parser({})) - spellings(torchruns_parser())

    assert {text.removeprefix("--").replace("-", "_") for text in extra} == OURS


@pytest.mark.parametrize("words", ["--re 3", "--r 3", "--no", "--no_p"])
def test_torchruns_abbreviations_are_not_ambiguous_for_our_own_options(words):
    try:
        given = torchruns_parser().parse_args([*words.split(), "train.py"])
    except SystemExit:
        pytest.skip("torchrun refuses it too")
    found = make_parser({}).parse_args([*words.split(), "train.py"])
    assert (found.redirects, found.no_python) == (given.redirects, given.no_python)


@pytest.mark.parametrize(
    ("words", "policy"),
    [("", RestartPolicy.COUNT), ("--restart-policy evidence", RestartPolicy.EVIDENCE)],
)
def test_restarts_are_counted_as_torchrun_does_unless_it_is_asked_otherwise(words, policy):
    assert parse(f"{words} train.py").restart_policy is policy


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ("", (60.0, 300.0)),
        ("--hang-timeout off", (0.0, 300.0)),
        ("--hang-timeout 20m", (1200.0, 1200.0)),
    ],
)
def test_the_hang_watch_obeys_the_option_that_its_messages_name(words, limits):
    found = parse(f"{words} train.py").limits
    assert (found.hang_s, found.hang_blind_s) == limits


@pytest.mark.parametrize(
    ("line", "environment", "no_spread"),
    [
        ("train.py", {}, False),
        ("--no-spread train.py", {}, True),
        ("--no_spread train.py", {}, True),
        ("train.py", {"PET_NO_SPREAD": "1"}, True),
        ("train.py --no-spread", {}, False),
    ],
)
def test_spreading_is_refused_by_a_flag_or_a_variable(line, environment, no_spread):
    assert parse(line, environment).no_spread is no_spread


def test_flags_are_flags_and_values_are_values_as_in_torchrun():
    def shape(parser):
        actions = (a for a in parser._actions if a.option_strings)
        return {a.dest: a.nargs == 0 for a in actions if a.dest not in OURS}

    assert shape(make_parser({})) == shape(torchruns_parser())


def test_muster_run_knows_every_option_of_torchrun_by_name():
    options = {s for s in spellings(torchruns_parser()) if s.startswith("--") and "_" not in s}

    assert options - {"--help"} == TORCHRUN_OPTIONS.keys()


def test_the_defaults_are_torchrun_s(tmp_path):
    line = parse("train.py")

    assert (line.min_nodes, line.max_nodes, line.num_workers) == (1, 1, 1)
    limits = Limits(max_restarts=0, grace_s=30.0, join_timeout_s=900.0, last_call_s=30.0)
    assert line.limits == limits
    assert (line.role, line.node_rank) == ("default", None)
    assert line.program.python == (sys.executable, "-u")
    assert line.program.cwd == str(tmp_path)
    assert line.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert line.notes == ()


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes=2 --nproc_per_node=4 --rdzv_id=j --rdzv_backend=c10d --rdzv_endpoint=n1:7",
        "--nnodes 2 --nproc-per-node 4 --rdzv-id j --rdzv-backend c10d --rdzv-endpoint n1:7",
    ],
    ids=["underscores", "dashes"],
)
def test_both_spellings_mean_the_same(line):
    found = parse(f"{line} train.py --x --nnodes 9")

    assert (found.min_nodes, found.max_nodes, found.num_workers) == (2, 2, 4)
    assert (found.meeting.host, found.meeting.port, found.meeting.rdzv_id) == ("n1", 7, "j")
    assert (found.meeting.static, found.node_rank, found.limits.max_restarts) == (False, None, 0)
    assert found.program.args == ("--x", "--nnodes", "9")


def test_variables_give_the_defaults_and_the_line_wins():
    environment = {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "8",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "n1",
        "PET_MODULE": "1",
        "PET_MAX_RESTARTS": "5",
    }

    found = parse("--nproc-per-node 2 pkg.train", environment)

    assert (found.min_nodes, found.max_nodes, found.num_workers) == (2, 4, 2)
    assert (found.meeting.host, found.meeting.port, found.limits.max_restarts) == ("n1", 29400, 5)
    assert found.program.kind is ScriptKind.MODULE


def test_use_env_of_an_older_launcher_changes_nothing():
    plain = parse("train.py")
    for spelling in ("--use_env", "--use-env"):
        assert replace(parse(f"{spelling} train.py"), meeting=plain.meeting) == plain


def test_the_interpreter_may_come_from_the_environment():
    assert parse("train.py", {"PYTHON_EXEC": "/py"}).program.python == ("/py", "-u")


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nnodes 1 --nproc-per-node 2 --master-addr n1 train.py",
        "--rdzv-id job-7 train.py",
        "--standalone --nnodes 2 --rdzv-endpoint n1:7 train.py",
        "--rdzv-backend c10d train.py",
    ],
)
def test_who_has_nobody_to_meet_takes_a_free_port(line):
    found = parse(line)

    assert (found.meeting.host, found.meeting.port) == ("localhost", 0)
    assert (found.meeting.alone, found.meeting.static, found.max_nodes) == (True, False, 1)


@pytest.mark.parametrize("line", ["train.py", "--rdzv-id x train.py", "--standalone train.py"])
def test_who_names_no_meeting_gets_a_fresh_run_id_each_time(line):
    ids = {parse(line).meeting.rdzv_id for _ in range(2)}

    assert len(ids) == 2
    assert all(str(uuid.UUID(text)) == text for text in ids)


@pytest.mark.parametrize(
    ("line", "environment", "port", "static"),
    [
        ("--master-port 7 train.py", {}, 7, True),
        ("train.py", {"PET_MASTER_PORT": "7"}, 7, True),
        ("--nnodes 2 --master-port 7 train.py", {}, 7, True),
        ("--nnodes 2 train.py", {}, 29500, True),
        ("--rdzv-endpoint n1 train.py", {}, 29500, True),
        ("--nnodes 2 --rdzv-backend c10d train.py", {}, 29400, False),
    ],
)
def test_a_meeting_that_is_named_keeps_its_port_and_id(line, environment, port, static):
    found = parse(line, environment).meeting

    assert (found.port, found.static, found.alone) == (port, static, False)
    assert found.rdzv_id == "none"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("n1:1234", "n1", 1234),
        ("n1", "n1", 29400),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("[fd00::1]:80", "fd00::1", 80),
        ("[fd00::1]", "fd00::1", 29400),
        ("fd00::1", "fd00::1", 29400),
    ],
)
def test_the_endpoint_is_a_host_with_or_without_a_port(text, host, port):
    found = parse(f"--rdzv-backend c10d --rdzv-endpoint {text} train.py")

    assert (found.meeting.host, found.meeting.port) == (host, port)


@pytest.mark.parametrize("address", ["n1", "10.0.0.1", "fd00::1"])
def test_the_static_rendezvous_has_address_and_port_apart(address):
    found = parse(f"--nnodes 2 --node-rank 1 --master-addr {address} --master-port 80 train.py")

    assert (found.meeting.host, found.meeting.port, found.node_rank) == (address, 80, 1)


@pytest.mark.parametrize(
    "text", ["n1:x", "n1:70000", "a:b:c:d", ":80", "[::1", "a..b:80", f"{'x' * 64}:80"]
)
def test_what_is_no_endpoint_is_one_problem(text):
    found = problems_of(f"--rdzv-backend c10d --rdzv-endpoint {text} train.py")

    assert len(found) == 1
    assert found[0].where == "--rdzv-endpoint"


@pytest.mark.parametrize("quote", ["", "'", '"'], ids=["plain", "single quotes", "double quotes"])
def test_the_rendezvous_conf_sets_limits_key_and_host(quote):
    conf = "join_timeout=7,last_call_timeout=3,is_host=1,secret_file=/k,rank=1"

    found = parse(f"--nnodes 2 --rdzv-conf={quote}{conf}{quote} train.py")

    assert (found.limits.join_timeout_s, found.limits.last_call_s) == (7.0, 3.0)
    assert (found.is_host, found.secret_file, found.node_rank) == (True, "/k", 1)


def test_timeout_is_a_limit_of_the_static_rendezvous_only():
    static = parse("--nnodes 2 --rdzv-conf timeout=7 train.py")
    c10d = parse("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1 --rdzv-conf timeout=7 train.py")

    assert (static.limits.join_timeout_s, static.notes) == (7.0, ())
    assert c10d.limits.join_timeout_s == 600.0
    assert c10d.notes == ("--rdzv-conf timeout has no effect with c10d, as in torchrun",)


def test_nodes_that_are_told_no_endpoint_learn_where_they_meet():
    found = parse("--nnodes 2 --rdzv-backend c10d train.py")

    assert found.notes == (
        "without --rdzv-endpoint the nodes meet at localhost:29400, as in torchrun",
    )


def test_what_has_no_effect_is_said():
    found = parse("--rdzv-conf read_timeout=1,foo=2 --standalone --nnodes 2 train.py")

    assert found.notes == (
        "--rdzv-conf read_timeout has no effect here",
        "--rdzv-conf foo is unknown and has no effect, as in torchrun",
        "--standalone: --nnodes and --rdzv-endpoint have no effect, as in torchrun",
    )


@pytest.mark.parametrize(
    ("line", "environment", "kind"),
    [
        ("train.py", {}, ScriptKind.FILE),
        ("train.py", {"PET_MODULE": "0"}, ScriptKind.FILE),
        ("-m train", {}, ScriptKind.MODULE),
        ("train", {"PET_MODULE": "1"}, ScriptKind.MODULE),
        ("--no-python train.py", {}, ScriptKind.COMMAND),
    ],
)
def test_the_program_is_a_file_a_module_or_a_command(line, environment, kind):
    assert parse(line, environment).program.kind is kind


def test_the_time_from_a_stop_to_the_kill_may_come_from_the_environment():
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}

    assert parse("train.py", environment).limits.grace_s == 7.0
    assert parse("--shutdown-timeout 9 train.py", environment).limits.grace_s == 9.0


def test_user_signals_are_left_to_those_who_catch_them():
    found = parse("--signals-to-handle SIGTERM,SIGUSR1,SIGUSR2 train.py")

    assert found.signals == (signal.SIGTERM,)


# Streams: 1 is stdout, 2 is stderr, 3 both.


@pytest.mark.parametrize(
    ("options", "rank", "console", "saved"),
    [
        ("--log-dir /logs", 0, {1, 2}, set()),
        ("--log-dir /logs -r 3", 0, set(), {1, 2}),
        ("--log-dir /logs -r 1", 0, {2}, {1}),
        ("--log-dir /logs -t 3", 0, {1, 2}, {1, 2}),
        ("--log-dir /logs -r 3 -t 1", 0, {1}, {1, 2}),
        ("--log-dir /logs -r 0:1,1:2", 0, {2}, {1}),
        ("--log-dir /logs -r 0:1,1:2", 7, {1, 2}, set()),  # it is not named
        ("--log-dir /logs -r 1:3", 0, {1, 2}, set()),
        ("--log-dir /logs --local-ranks-filter 0,2", 0, {1, 2}, set()),
        ("--log-dir /logs --local-ranks-filter 1,2", 0, set(), set()),
        ("-r 3", 0, set(), set()),  # nothing is saved without a folder
    ],
)
def test_streams_of_a_local_rank_are_shown_and_saved(options, rank, console, saved):
    found = parse(f"{options} train.py")

    assert (found.console(rank), found.saved(rank)) == (console, saved)


# What is refused.


@pytest.mark.parametrize("dest", REFUSED)
def test_a_refused_option_gives_its_sentence(dest):
    option = "--" + dest.replace("_", "-")

    (problem,) = problems_of(f"{option} x train.py")

    assert problem.what == f"`{option}` is not supported"
    assert problem.why == REFUSED[dest]
    assert problem.fix == f"leave {option} out"


def test_the_defaults_of_refused_options_are_taken():
    parse("--event-log-handler null --logs-specs default train.py")


@pytest.mark.parametrize("name", ["PET_NUMA_BINDING", "PET_LOGS_SPECS"])
def test_a_refused_option_is_refused_from_the_environment_too(name):
    assert len(problems_of("train.py", {name: "x"})) == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--nproc-per-node xpu train.py", "`xpu` is not supported"),
        ("--nproc-per-node 4,2 train.py", "`4,2` is not a valid number of workers"),
        ("--nproc-per-node ² train.py", "`²` is not a valid number of workers"),
        ("--rdzv-backend etcd train.py", "the rendezvous backend `etcd` is not supported"),
        ("--master-port x train.py", "`127.0.0.1:x` is not a valid HOST:PORT"),
        ("-m --no-python train.py", "--module and --no-python exclude each other"),
        ("--nnodes 2 --node-rank 2 train.py", "node rank 2 is outside a run of 2 nodes"),
        ("--node-rank x train.py", "`x` is not a valid node rank"),
        ("--max-restarts -1 train.py", "`-1` is not a valid number of restarts"),
        ("--signals-to-handle SIGFOO train.py", "there is no signal `SIGFOO`"),
        ("--signals-to-handle SIGKILL train.py", "SIGKILL can't be handled"),
        ("--local-ranks-filter a train.py", "`a` is not a valid list of local ranks"),
        ("--restart-policy x train.py", "`x` is not a restart policy"),
        ("--hang-timeout x train.py", "`x` is not a time above 0"),
        ("-r 4 train.py", "`4` does not name streams"),
        ("-t 0:9 train.py", "`0:9` does not name streams"),
        ("--shutdown-timeout x train.py", "`x` is not a valid number of seconds"),
        ("--rdzv-conf foo train.py", "`foo` is not KEY=VALUE"),
        ("trian.py", "the script does not exist"),
    ],
)
def test_a_mistake_is_one_problem(line, what):
    assert [problem.what for problem in problems_of(line)] == [what]


def test_an_endpoint_without_a_host_is_this_one_where_the_head_is_known():
    words = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint :29500 train.py"
    problems = Problems()
    found = parse_torchrun(words.split(), {}, (), problems, knows_head=True)

    assert (found.meeting.host, found.meeting.port) == ("localhost", 29500)
    assert [one.what for one in problems_of(words)] == ["`:29500` is not a valid HOST:PORT"]


def test_all_problems_are_found_at_once():
    found = problems_of("--nnodes 3:2 --max-restarts x --tee 9 --numa-binding node trian.py")

    assert [problem.what for problem in found] == [
        "`--numa-binding` is not supported",
        "`3:2` asks for at least 3 and at most 2 nodes",
        "`x` is not a valid number of restarts",
        "`9` does not name streams",
        "the script does not exist",
    ]


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("", "`muster torchrun` needs a script", NO_SCRIPT),
        ("--nnodes=1train.py", "`muster torchrun` needs a script", NO_SCRIPT),
        ("--nnodes", "`--nnodes` needs a value", "muster torchrun --help"),
        ("--nproc_per_node", "`--nproc_per_node` needs a value", "muster torchrun --help"),
        (
            "--nproc-per-nodes=2 train.py",
            "torchrun has no option `--nproc-per-nodes`",
            "did you mean `--nproc-per-node`?",
        ),
        ("--xyzzy train.py", "torchrun has no option `--xyzzy`", "muster torchrun --help"),
    ],
)
def test_what_is_not_torchrun_s_line_at_all_is_refused(line, what, fix):
    with pytest.raises(UsageError) as caught:
        parse_torchrun(line.split(), {}, (), Problems())

    assert (caught.value.what, caught.value.fix) == (what, fix)


OPTIONS = [a for a in make_parser({})._actions if a.option_strings and a.dest != "help"]


@given(st.sampled_from(OPTIONS), st.text(max_size=8))
def test_any_value_of_any_option_is_taken_or_refused(action, text):
    words = [f"{action.option_strings[-1]}={text}"] if action.nargs != 0 else []
    problems = Problems()
    try:
        found = parse_torchrun([*words, os.path.abspath("train.py")], {}, (), problems)
    except UsageError:
        return
    assert (found is None) == bool(problems.found)


@pytest.mark.parametrize(
    ("line", "glued"),
    [
        ("--nproc_per_node=2--nnodes=1 train.py", "--nnodes"),
        ("--nproc-per-node=2--nnodes=1--rdzv_id=7--rdzv_endpoint=n1:29500train.py", "--nnodes"),
        ("--nnodes=1 --nproc_per_node=2--standalone", "--standalone"),
    ],
)
def test_a_blank_that_is_missing_between_two_options_is_named(line, glued):
    with pytest.raises(UsageError, match=f"there is no blank before `{glued}`") as error:
        parse(line)
    assert "muster lint" in error.value.fix


def test_an_argument_of_the_script_may_look_like_two_options():
    assert parse("--nnodes=1 train.py --tag=a--b=c").program.args == ("--tag=a--b=c",)


def test_a_file_timer_without_a_server_is_said(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    assert any("file timers" in note for note in parse("train.py").notes)
    monkeypatch.delenv("TORCHELASTIC_ENABLE_FILE_TIMER")
    assert not any("file timers" in note for note in parse("train.py").notes)
