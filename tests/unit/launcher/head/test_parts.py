"""What the launcher adds to a head: the board of a run, clients' commands inside of it, and its page for Prometheus."""

import json
import math
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kit.values import worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.model.ranks import assign_ranks
from torchmuster.core.net import messages
from torchmuster.core.net.channel import MAX_FRAME_BYTES
from torchmuster.launcher.head import parts
from torchmuster.launcher.model.progress import RankProgress, RankSample
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.part_messages import AskBoard, BoardSample

# The board: what changed between two reports, who waits for whom, and a record that stays small.


NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.fixture
def lines():
    return []


@pytest.fixture
def board(lines):
    board = parts.Board(lines.append)
    board.begin(100.0, 0, NODES)
    return board


def plain(rank, active_s, **given):
    return RankProgress(rank=rank, state="R", active_s=active_s, rss_mib=300, **given)


def stepping(rank, steps, data_s, forward_s, step_s=0.1):
    seconds = [0.0] * len(RankPhase)
    seconds[RankPhase.DATA], seconds[RankPhase.FORWARD] = data_s * steps, forward_s * steps
    return RankProgress(
        rank=rank,
        state="S",
        active_s=float(steps),
        beat_age_s=0.5,
        steps_here=steps + 1,
        step=steps + 101,
        step_at=7.0 + step_s * steps,
        phase=RankPhase.DATA,
        seconds=tuple(seconds),
        median_s=step_s,
    )


def shown(board, now):
    (told,) = board.answer(now, "a")
    return told.sample


def test_of_a_plain_script_the_kernel_tells_processors_memory_and_data(board):
    board.take(102.0, [plain(rank, 1.0, io_bytes=0) for rank in range(4)])
    board.take(104.0, [plain(rank, 4.0, io_bytes=3 << 20) for rank in range(4)])
    sample = shown(board, 104.5)

    assert (sample.cpus, sample.io_mib, sample.rss_mib) == ((1.5,) * 4, (3.0,) * 4, (300,) * 4)
    assert sample.nodes == ("n1", "n1", "n2", "n2")
    assert sample.report_ages_s == (0.5,) * 4
    assert sample.steps == sample.phases == sample.median_s == sample.gpu_mib == ()


def test_who_waits_for_a_slow_rank_is_seen_in_the_time_of_its_steps(board):
    data = (0.02, 0.02, 0.02, 0.06)
    for now, steps in ((102.0, 10), (104.0, 30)):
        board.take(now, [stepping(rank, steps, data[rank], 0.01) for rank in range(4)])
    sample = shown(board, 104.0)

    assert sample.steps == (131,) * 4
    assert sample.steps_per_s == (10.0,) * 4
    assert sample.data_s == (0.4, 0.4, 0.4, 1.2)
    assert sample.rest_s == (1.4, 1.4, 1.4, 0.6)
    assert sample.wait_s == (0.8, 0.8, 0.8, 0.0)


def test_a_rank_that_nobody_told_of_or_that_has_ended_is_said_to_be_so(board):
    board.take(102.0, [plain(0, 1.0), plain(1, 1.0)])
    board.note_ends([worker_end(EndKind.SUCCESS, rank=1, local_rank=1)])

    assert shown(board, 103.0).states == ("R", "", "?", "?")


def test_numbers_of_those_who_look_are_of_the_last_twenty_seconds(board):
    for second in range(0, 100, 2):
        rate = 1.0 if second < 50 else 3.0
        spent = second * rate if second < 50 else 50 + (second - 50) * rate
        board.take(102.0 + second, [plain(0, spent)])

    assert shown(board, 200.0).cpus[0] == 3.0
    assert 10.0 <= shown(board, 200.0).over_s <= 20.0


def test_the_record_has_a_line_every_ten_seconds_and_one_at_the_end(board, lines):
    for second in range(0, 32, 2):
        board.take(100.0 + second, [stepping(rank, second, 0.01, 0.01) for rank in range(4)])
        board.advance(100.0 + second)
    board.end(131.0)
    samples = [codec.from_plain(RankSample, json.loads(line)) for line in lines]

    assert [sample.over_s for sample in samples] == [10.0, 10.0, 10.0]
    assert [sample.steps_here[0] for sample in samples] == [11, 21, 31]
    assert shown(board, 132.0) is None


def test_what_came_since_the_last_line_is_written_when_the_next_attempt_begins(board, lines):
    board.take(103.0, [plain(rank, 1.0) for rank in range(4)])
    board.begin(104.0, 1, NODES)
    board.end(105.0)

    assert [json.loads(line)["attempt"] for line in lines] == [0]


def weeks_of(num_ranks, begin_bytes=0, days=7):
    """Return the bytes of a record of so many days, played in leaps of the interval."""
    sizes = []
    board = parts.Board(lambda line: sizes.append(len(line)), begin_bytes)
    board.begin(0.0, 0, {rank: f"node{rank // 8:04}" for rank in range(num_ranks)})
    reports = [stepping(rank, 1000 + rank, 0.0123, 0.0456) for rank in range(num_ranks)]
    now = 0.0
    while now < days * 86400:
        done = sum(sizes) + begin_bytes
        now += parts.WRITE_EVERY_S * 2 ** (done // parts.DOUBLE_EVERY_BYTES)
        board.take(now, reports)
        board.advance(now)
    return sum(sizes), len(sizes)


@pytest.mark.slow
def test_a_week_of_512_ranks_takes_less_than_50_mib():
    size, num_lines = weeks_of(512)
    assert size < 50 << 20
    assert num_lines > 400


def test_a_head_that_takes_over_goes_on_with_the_interval_of_the_record():
    size, _ = weeks_of(64, begin_bytes=5 * parts.DOUBLE_EVERY_BYTES, days=1)
    assert size < 2 << 20


@pytest.mark.parametrize("num_ranks", [512, 4096])
def test_every_message_to_a_client_fits_into_a_frame(num_ranks):
    board = parts.Board(lambda line: None)
    name = "a-node-with-a-very-long-name.of.a-cluster.example.org"
    board.begin(0.0, 0, {rank: f"{name}{rank // 8}" for rank in range(num_ranks)})
    reports = [stepping(rank, 10_000_000, 0.0123456, 0.0456789) for rank in range(num_ranks)]
    for now in (2.0, 4.0):
        board.take(now, reports)
    told = [messages.encode(message) for message in board.answer(5.0, "a")]

    assert max(map(len, told)) < MAX_FRAME_BYTES / 2
    assert sum(len(messages.decode(one).sample.nodes) for one in told) == num_ranks


def test_the_speed_is_known_soon_after_the_first_step(board):
    start = [RankProgress(rank=r, state="R", active_s=0.0, beat_age_s=0.1) for r in range(4)]
    board.take(102.0, start)
    board.take(104.0, [stepping(rank, 5, 0.01, 0.01) for rank in range(4)])
    board.take(106.0, [stepping(rank, 25, 0.01, 0.01) for rank in range(4)])
    sample = shown(board, 106.0)

    assert sample.steps_per_s == (10.0,) * 4
    assert sample.wait_s == (0.0,) * 4


def test_who_looks_while_no_attempt_runs_is_told_so():
    head = SimpleNamespace(
        disk=None,
        options=SimpleNamespace(run_dir=RunDir("/r"), samples_bytes=0),
        clock=lambda: 0.0,
        policy=SimpleNamespace(running=None),
    )
    client = Client()
    assert parts.BoardPart(head).take_request(SimpleNamespace(channel=client), AskBoard(ask_id="x"))
    assert client.got == [BoardSample(ask_id="x", sample=None)]


class Client:
    """The connection of a client that notes what it gets."""

    def __init__(self):
        self.got = []

    def send_nowait(self, message):
        self.got.append(message)


# `muster exec`: every message goes to whom it belongs, and to nobody else.


class Stage:
    """A relay with two running tasks, `a` and `b`."""

    def __init__(self):
        self.sent = []
        self.relay = parts.ExecRelay(
            lambda word: word if word in ("a", "b") else None,
            lambda task, message: self.sent.append((task, message)),
            lambda word: (f"{word} does not run", "why"),
        )

    def start(self, client, exec_id="1", task="a"):
        start = part_messages.ExecStart(exec_id=exec_id, task=task, argv=("ls",))
        self.relay.from_client(client, start)
        return start


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def two(stage):
    """Return the clients of two commands: `1` in task a, `2` in task b."""
    clients = Client(), Client()
    stage.starts = [stage.start(clients[0]), stage.start(clients[1], "2", "b")]
    return clients


def test_a_start_goes_to_its_task_and_the_output_back_to_its_client(stage, two):
    output = part_messages.ExecOutput(exec_id="2", stream=1, data=b"")
    stage.relay.from_agent("b", output)
    assert stage.sent == [("a", stage.starts[0]), ("b", stage.starts[1])]
    assert [client.got for client in two] == [[], [output]]


def test_a_task_that_does_not_run_is_refused_with_the_reason(stage):
    client = Client()
    stage.start(client, task="c")
    assert client.got == [part_messages.ExecRefused(exec_id="1", what="c does not run", why="why")]
    assert stage.relay._routes == {}


def test_a_command_of_another_client_can_t_be_touched(stage, two):
    stage.sent.clear()
    other = Client()
    stage.relay.from_client(other, part_messages.ExecSignal(exec_id="1", signum=9))
    stage.relay.client_gone(other)
    assert stage.sent == []


def test_a_number_that_is_taken_is_refused(stage, two):
    other = Client()
    stage.start(other)
    assert isinstance(other.got[0], part_messages.ExecRefused)
    assert len(stage.sent) == 2


def test_another_task_can_t_answer(stage, two):
    stage.relay.from_agent("b", part_messages.ExecEnded(exec_id="1", code=0))
    assert two[0].got == []


def test_a_client_that_goes_takes_all_its_commands_with_it(stage):
    client = Client()
    stage.start(client, "1", "a")
    stage.start(client, "2", "b")
    stage.sent.clear()
    stage.relay.client_gone(client)
    leaves = [part_messages.ExecLeave(exec_id=exec_id) for exec_id in "12"]
    assert stage.sent == [("a", leaves[0]), ("b", leaves[1])]
    assert stage.relay._routes == {}


@pytest.mark.parametrize(
    "last",
    [
        part_messages.ExecEnded(exec_id="1", code=3),
        part_messages.ExecRefused(exec_id="1", what="no"),
    ],
)
def test_nothing_is_remembered_of_a_command_that_has_ended(stage, last):
    client = Client()
    stage.start(client)
    stage.relay.from_agent("a", last)
    assert client.got == [last]
    assert stage.relay._routes == {}


def test_clients_hear_that_their_task_is_gone_and_others_do_not(stage, two):
    stage.relay.agent_gone("a", "it was lost")
    end = part_messages.ExecEnded(exec_id="1", code=137, why="it was lost")
    assert [client.got for client in two] == [[end], []]


@pytest.fixture
def named():
    """Return the agents of two nodes with two ranks each."""
    agents = {
        place: SimpleNamespace(
            name=name, is_present=True, hello=SimpleNamespace(host=f"{name}.site")
        )
        for place, name in enumerate(("n1", "n2"))
    }
    attempt = SimpleNamespace(members=agents, ranks=assign_ranks({0: 2, 1: 2}))
    return parts.NamedAgents(lambda: attempt, lambda member: member.name)


@pytest.mark.parametrize(
    ("word", "node"),
    [("rank 0", "n1"), ("rank 3", "n2"), ("node n2", "n2"), ("node n1.site", "n1")],
)
def test_a_word_names_the_agent_of_a_rank_or_a_node(named, word, node):
    assert named.find(word).name == node


@pytest.mark.parametrize(
    ("word", "what", "why"),
    [
        ("rank 4", "the run has no rank 4 now", "it has ranks 0 to 3"),
        ("node n22", "the run has no node `n22` now", "did you mean n2?"),
        ("train", "the run has no rank  now", "it has ranks 0 to 3"),
    ],
)
def test_of_who_is_not_there_is_said_what_is(named, word, what, why):
    assert named.find(word) is None
    assert named.why_not(word) == (what, why)


def test_before_the_first_attempt_there_is_nobody():
    named = parts.NamedAgents(lambda: None, lambda member: "")
    assert named.find("rank 0") is None
    assert named.why_not("rank 0")[0] == "no worker of the run has started yet"


# A run in the words of Prometheus, as its own reference parser reads them.


SAMPLE = RankSample(
    time="2026-11-23T12:00:00.000Z",
    attempt=1,
    over_s=10.0,
    nodes=("n1", 'n"2\\\n'),
    states=("R", ""),
    report_ages_s=(0.5, 0.5),
    steps=(40, 41),
    steps_here=(10, 11),
    ages_s=(0.1, 3.0),
    phases=("compute", "forward"),
    steps_per_s=(2.0, 2.0),
    median_s=(0.5, 0.5),
    data_s=(1.0, 2.0),
    forward_s=(1.0, 2.0),
    rest_s=(8.0, 0.0),
    wait_s=(5.0, 0.0),
    cpus=(1.5, None),
    rss_mib=(300, None),
    gpu_percent=(87, None),
    gpu_mib=(1024, None),
)


@pytest.fixture
def training(tmp_path):
    return parts.NewestTraining(str(tmp_path / "training.jsonl"))


def write(training, *events):
    with open(training.path, "a") as file:
        file.writelines(
            event if isinstance(event, str) else json.dumps(event) + "\n" for event in events
        )


def read(text):
    """Return {(name, labels): value}, as the reference parser of OpenMetrics reads it."""
    families = list(text_string_to_metric_families(text))
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_ranks_are_told_in_base_units(training):
    found = read(parts.render("run-1", 2, SAMPLE, training))
    first, second = (("node", "n1"), ("rank", "0")), (("node", 'n"2\\\n'), ("rank", "1"))
    assert found["torchmuster_run_info", ("run_id", "run-1")] == 1
    assert found["torchmuster_attempts_total",] == 2
    assert found["torchmuster_rank_up", *first] == 1
    assert found["torchmuster_rank_up", *second] == 0
    assert found["torchmuster_rank_step", *second] == 41
    assert found["torchmuster_rank_wait_ratio", *first] == 0.5
    assert found["torchmuster_rank_wait_ratio", *second] == 0
    assert found["torchmuster_rank_resident_memory_bytes", *first] == 300 << 20
    assert found["torchmuster_rank_gpu_utilization_ratio", *first] == pytest.approx(0.87)
    assert ("torchmuster_rank_cpu_cores", *second) not in found


def test_a_plain_script_has_no_steps_and_a_run_between_attempts_no_ranks(training):
    plain = RankSample(
        time="", attempt=0, over_s=1.0, nodes=("n1",), states=("S",), report_ages_s=(0.0,)
    )
    names = {key[0] for key in read(parts.render("r", 1, plain, training))}
    assert names == {"torchmuster_run_info", "torchmuster_attempts_total", "torchmuster_rank_up"}
    names = {key[0] for key in read(parts.render("r", 1, None, training))}
    assert names == {"torchmuster_run_info", "torchmuster_attempts_total"}


def test_the_scripts_own_metrics_are_the_newest_also_when_they_are_no_numbers(training):
    write(training, {"event": "metrics", "step": 1, "values": {"loss": 3.0, 'a"b': 1}})
    training.read()
    write(
        training,
        {"event": "metrics", "step": 2, "values": {"loss": float("nan"), "top": float("inf")}},
        {"event": "saved", "step": 2, "saved": 1},
    )
    training.read()
    found = read(parts.render("r", 1, None, training))
    assert math.isnan(found["torchmuster_training", ("name", "loss")])
    assert found["torchmuster_training", ("name", "top")] == math.inf
    assert found["torchmuster_training", ("name", 'a"b')] == 1
    assert found["torchmuster_training_step",] == 2
    assert found["torchmuster_snapshot_step",] == 1


def test_a_record_that_is_half_written_or_no_record_changes_nothing(training):
    training.read()
    write(training, '{"event":"metrics","step":1,"val')
    training.read()
    assert training.values == {}
    write(
        training, 'ues":{"loss":1.0}}\n', "[1]\n", "no json\n", '{"event":"metrics","values":3}\n'
    )
    training.read()
    assert (training.step, training.values) == (1, {"loss": 1.0})


def test_a_script_with_any_number_of_names_does_not_fill_the_memory(training):
    write(training, {"event": "metrics", "step": 1, "values": {f"m{n}": 1.0 for n in range(1000)}})
    training.read()
    assert len(training.values) == 200
