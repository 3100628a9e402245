"""What stands before a message says who wrote it, and when; what is left is the message."""

import pytest

from torchmuster.diagnose.explain.events import Who
from torchmuster.diagnose.explain.reading.prefix import clean, split


@pytest.mark.parametrize(
    ("line", "message", "who"),
    [
        ("3: ValueError: x", "ValueError: x", Who(task=3)),
        ("[rank5]: ValueError: x", "ValueError: x", Who(rank=5)),
        ("[default2]:ValueError: x", "ValueError: x", Who(task=2)),
        ("n1: ValueError: x", "ValueError: x", Who(host="n1")),
        ("gpu-a3.cluster.org: ValueError: x", "ValueError: x", Who(host="gpu-a3.cluster.org")),
        ("n1: [rank0]:   frame", "  frame", Who(host="n1", rank=0)),
        ("n1:   frame", "  frame", Who(host="n1")),
        ("worker-0  | boom", "boom", Who(host="worker-0")),
        ("nid001234.hsn.cm 3: boom", "boom", Who(host="nid001234.hsn.cm")),
        ("[1,3]<stderr>:boom", "boom", Who(task=3)),
        ("(RayTrainWorker pid=7, ip=10.0.0.2) boom", "boom", Who(host="10.0.0.2")),
        ("2026-03-14T09:26:53Z stderr F boom", "boom", Who()),
        ("[pod/train-worker-0/pytorch] boom", "boom", Who(host="train-worker-0")),
        ("n7:123:456 [0] NCCL WARN x", "NCCL WARN x", Who(host="n7", rank=0)),
        ("ValueError: x", "ValueError: x", Who()),
        ("requests.exceptions.ConnectTimeout: x", "requests.exceptions.ConnectTimeout: x", Who()),
        ("error: 0.5", "error: 0.5", Who()),
        ("[c10d] The client", "[c10d] The client", Who()),
    ],
)
def test_labels_say_who_wrote(line, message, who):
    text, found, _, _ = split(line, 2026)
    assert text == message
    if line.startswith("n7:"):
        assert found.host == who.host
    else:
        assert found == who


@pytest.mark.parametrize(
    "line",
    [
        "2026-03-14 09:26:53 boom",
        "2026-03-14T09:26:53Z boom",
        "[2026-03-14 09:26:53,000] boom",
        "2026-03-14T11:26:53.000+02:00 boom",
        "Mar 14 09:26:53 boom",
        "Mar 14 09:26:53 n1 python3[77]: boom",
        "09:26:53 boom",
        "[09:26:53] boom",
        "W0314 09:26:53.000000 77 torch/x.py:9] boom",
        "[W314 09:26:53.000000000 socket.cpp:9] boom",
    ],
)
def test_times_are_read_in_every_spelling(line):
    text, _, when, _ = split(line, 2026)
    assert text == "boom"
    assert when is None or when == pytest.approx(1773480413.0)


def test_indentation_behind_a_time_is_kept():
    text, _, _, _ = split('2026-03-14 09:26:53   File "a.py", line 3', 2026)
    assert text.startswith("  File")


@pytest.mark.parametrize("line", ["2026-99-99 10:00:00 x", "I1399 99:99:99.1 a.py:1] x"])
def test_impossible_times_do_no_harm(line):
    split(line, 2026)


def test_colours_are_taken_away_and_length_is_bounded():
    assert clean(b"\x1b[31;1mred\x1b[0m \x1b]0;title\x07done") == "red done"
    assert len(clean(b"x" * 100_000)) <= 2000


def test_logger_of_torch_is_no_host():
    text = "torch.distributed.distributed_c10d: [INFO] Added key"
    assert split(text, 2026)[1] == Who()


@pytest.mark.parametrize(
    "when", ["2026-02-30 09:26:53", "2026-03-14 24:26:53", "Feb 30 09:26:53", "Mar 14 09:26:99"]
)
def test_a_moment_that_does_not_exist_is_not_1970(when):
    assert split(f"{when} n1 error: x", 2026).when is None
