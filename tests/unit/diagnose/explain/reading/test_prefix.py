"""What stands before a message says who wrote it, and when; what is left is the message."""

import pytest

from torchmuster.diagnose.explain.events import Who
from torchmuster.diagnose.explain.reading.prefix import clean, split
from unit.diagnose.explain.logs import cause_of, events_of, traceback_of


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


# Every launcher, collector and logger has its own way to begin a line: a traceback behind each of them is read.


NOBODY = Who()
ROWS = {
    "srun": ("12: ", Who(task=12), ""),
    "srun, two": (" 3: ", Who(task=3), ""),
    "kubectl": ("[pod/train-worker-0/pytorch] ", Who(host="train-worker-0"), ""),
    "kubectl, times": ("[pod/train-worker-0/pytorch] 2025-01-01T00:00:00.000000000Z ", Who(host="train-worker-0"), ""),
    "stern": ("train-worker-0 pytorch ", Who(host="train-worker-0"), ""),
    "kail": ("ml/train-worker-0[pytorch]: ", Who(host="train-worker-0"), ""),
    "compose": ("trainer-1  | ", Who(host="trainer-1"), ""),
    "CRI": ("2025-01-01T00:00:00.000000000Z stderr F ", NOBODY, ""),
    "journald": ("Oct 16 09:54:43 n01 python3[77]: ", Who(host="n01"), ""),
    "journald, iso": ("2025-01-01T00:00:00+0000 n01 python3[77]: ", Who(host="n01"), ""),
    "syslog of one word": ("Oct 16 09:54:43 gpunode python3[77]: ", Who(host="gpunode"), ""),
    "syslog, kernel": ("Oct 16 09:54:43 n01 kernel: ", Who(host="n01"), ""),
    "ts": ("Oct 16 09:54:43 ", NOBODY, ""),
    "ts, iso": ("[2025-01-01 00:00:00] ", NOBODY, ""),
    "dmesg": ("[12345.678901] ", NOBODY, ""),
    "dmesg -T": ("[Mon Oct 16 09:54:43 2017] ", NOBODY, ""),
    "ray": ("(RayTrainWorker pid=1234, ip=10.0.0.1) ", Who(host="10.0.0.1"), ""),
    "ray, here": ("(RayTrainWorker pid=1234) ", NOBODY, ""),
    "Open MPI": ("[1,3]<stderr>:", Who(task=3), ""),
    "Open MPI, times": ("[1,3]<stderr>: ", Who(task=3), ""),
    "PRRTE": ("[prterun-n01-1234@1,3]<stderr>: ", Who(task=3), ""),
    "Intel MPI": ("[3] ", Who(rank=3), ""),
    "pdsh": ("n01: ", Who(host="n01"), ""),
    "PALS": ("nid001234.hsn.cm 3: ", Who(host="nid001234.hsn.cm"), ""),
    "torchrun": ("[default3]:", Who(task=3), ""),
    "torch 2": ("[rank3]: ", Who(rank=3), ""),
    "SageMaker": ("[1,mpirank:0,algo-1]<stderr>:", Who(host="algo-1", task=0), ""),
    "Actions": ("2025-01-01T00:00:00.0000000Z ", NOBODY, ""),
    "Actions, error": ("2025-01-01T00:00:00.0000000Z ##[error]", NOBODY, "error"),
    "accelerate": ("2025-01-01 00:00:00,123 - ERROR - name.of - ", NOBODY, "error"),
    "name first": ("2025-01-01 00:00:00,123 - name.of - ERROR - ", NOBODY, "error"),
    "month first": ("01/31/2025 00:00:00 - ERROR - __main__ - ", NOBODY, "error"),
    "HuggingFace": ("[ERROR|trainer.py:12] 2025-01-01 00:00:00,123 >> ", NOBODY, "error"),
    "logging": ("ERROR:name.of:", NOBODY, "error"),
    "logging, root": ("ERROR:root:", NOBODY, "error"),
    "logging, labelled": ("3: ERROR:root:", Who(task=3), "error"),
    "loguru": ("2025-01-01 00:00:00.123 | ERROR    | __main__:main:9 - ", NOBODY, "error"),
    "DeepSpeed": ("[2025-01-01 00:00:00,123] [ERROR] [engine.py:1:fn] ", NOBODY, "error"),
    "DeepSpeed, pdsh": ("n01: [2025-01-01 00:00:00,123] [ERROR] [a.py:1:f] ", Who(host="n01"), "error"),
    "glog": ("E0101 00:00:00.000000 77 file.py:9] ", NOBODY, "error"),
    "absl": ("W0101 00:00:00.000000 140735 file.py:9] ", NOBODY, "warning"),
    "Azure ML": ("2025-01-01 00:00:00,123|azureml.core|ERROR|", NOBODY, "error"),
    "toolkit": ("2025-01-01 00:00:00,123 sagemaker-training-toolkit ERROR    ", NOBODY, "error"),
    "colours": ("\x1b[31m[rank3]\x1b[0m: ", Who(rank=3), ""),
    "progress bar": ("epoch 1:  3%|#  | 3/100 [00:01<00:33, 3.0it/s]\r", NOBODY, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_traceback_behind_a_prefix_is_read(tmp_path, name):
    before, who, level = ROWS[name]
    lines = traceback_of("ValueError: bad label 7").splitlines()
    text = "".join(f"{before}{line}\n" for line in lines)
    (event,) = [event for event in events_of(tmp_path, text) if event.kind == "exception"]
    assert event.get("message") == "bad label 7"
    assert event.get("where") == "/home/u/train.py:9"
    assert (event.who, event.line.level) == (who, level)
    assert event.get("uncaught")


@pytest.mark.parametrize("name", ROWS)
def test_word_of_the_kernel_behind_a_prefix_is_read(tmp_path, name):
    before = ROWS[name][0]
    events = events_of(tmp_path, f"{before}Out of memory: Killed process 7 (python)\n")
    assert [event.kind for event in events if event.kind != "progress"] == ["oom_proof"]


@pytest.mark.parametrize(
    "line",
    [
        "2025-01-01 00:00:00,123 - WARNING - net - connection refused, once more in 5 s",
        "WARNING:net:connection refused, once more in 5 s",
        '{"level": "info", "message": "connection refused, once more in 5 s"}',
        'time="2025-01-01T00:00:00Z" level=warning msg="connection refused"',
        "/opt/x/net.py:12: UserWarning: connection refused",
        "##[warning]connection refused",
        "[2025-01-01 00:00:00,123] [INFO] [engine.py:1:fn] unable to find a checkpoint",
    ],
)  # fmt: skip
def test_what_a_logger_calls_mild_is_no_cause(tmp_path, line):
    assert cause_of(tmp_path, job=f"{line}\n") == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "2025-01-01 00:00:00,123 - ERROR - net - the frobnicator has gone",
        "2025-01-01 00:00:00.123 | CRITICAL | __main__:main:9 - the frobnicator has gone",
        '{"level": "error", "message": "the frobnicator has gone"}',
        "E0101 00:00:00.000000 77 file.py:9] the frobnicator has gone",
        "##[error]the frobnicator has gone",
    ],
)
def test_what_a_logger_calls_an_error_is_shown_when_nothing_else_is_known(tmp_path, line):
    assert cause_of(tmp_path, job=f"step 1\n{line}\n") == "reported"


@pytest.mark.parametrize(
    "line",
    [
        "[10] items were read",
        "epoch-3 loss 0.5",
        "the kernel: a picture",
        "Mon loss 0.5",
        "a-1 b c",
        "NOTE that this is slow",
    ],
)
def test_words_that_only_look_like_a_prefix_stay(tmp_path, line):
    assert split(line, 2026) == (line, NOBODY, None, "")
