"""The board of a run: what changed between two reports, who waits for whom, and a record that stays small."""

import json
from types import SimpleNamespace

import pytest

from kit.values import worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.net import messages
from torchmuster.core.net.channel import MAX_FRAME_BYTES
from torchmuster.launcher.head.parts import DOUBLE_EVERY_BYTES, WRITE_EVERY_S, Board, BoardPart
from torchmuster.launcher.model.progress import RankProgress, RankSample
from torchmuster.launcher.net.part_messages import AskBoard, BoardSample

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.fixture
def lines():
    return []


@pytest.fixture
def board(lines):
    board = Board(lines.append)
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


def test_nothing_runs_nothing_is_told(lines):
    assert shown(Board(lines.append), 5.0) is None


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
    board = Board(lambda line: sizes.append(len(line)), begin_bytes)
    board.begin(0.0, 0, {rank: f"node{rank // 8:04}" for rank in range(num_ranks)})
    reports = [stepping(rank, 1000 + rank, 0.0123, 0.0456) for rank in range(num_ranks)]
    now = 0.0
    while now < days * 86400:
        done = sum(sizes) + begin_bytes
        now += WRITE_EVERY_S * 2 ** (done // DOUBLE_EVERY_BYTES)
        board.take(now, reports)
        board.advance(now)
    return sum(sizes), len(sizes)


def test_a_week_of_512_ranks_takes_less_than_50_mib():
    size, num_lines = weeks_of(512)
    assert size < 50 << 20
    assert num_lines > 400


def test_a_head_that_takes_over_goes_on_with_the_interval_of_the_record():
    size, _ = weeks_of(64, begin_bytes=5 * DOUBLE_EVERY_BYTES, days=1)
    assert size < 2 << 20


@pytest.mark.parametrize("num_ranks", [512, 4096])
def test_every_message_to_a_client_fits_into_a_frame(num_ranks):
    board = Board(lambda line: None)
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
    sent = []
    client = SimpleNamespace(channel=SimpleNamespace(send_nowait=sent.append))
    assert BoardPart(head).take_request(client, AskBoard(ask_id="x"))
    assert sent == [BoardSample(ask_id="x", sample=None)]
