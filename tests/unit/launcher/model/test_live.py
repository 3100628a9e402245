"""The words of progress bars; what only looks like one is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.model.live import ProgressBar, read_bar


def test_the_last_state_of_a_bar_counts():
    text = "start\n\r 10%|#   | 100/1000 [00:03<00:30, 30.1it/s]\r 37%|### | 369/1000 [00:12<00:21, 30.4it/s]"
    assert read_bar(text) == ProgressBar(done=369, total=1000, speed="30.4it/s", left="00:21")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1/4 [00:00<?, ?it/s]", ProgressBar(done=1, total=4, speed="", left="")),
        (
            "Epoch 3: 25%|##5 | 25/100 [1:02:03<2:00, 1.5s/it, loss=0.3]",
            ProgressBar(done=25, total=100, speed="1.5s/it", left="2:00"),
        ),
        (
            "loss=0.1: 5/10 [00:01<00:01,  4.90batch/s]\n",
            ProgressBar(done=5, total=10, speed="4.90batch/s", left="00:01"),
        ),
        ("2026/11/23 [10:00] started", None),
        ("12/10 [00:01<00:01, 4.9it/s]", None),
        ("3/0 [00:01<00:01, 4.9it/s]", None),
        ("step 100/200 loss 0.3", None),
        ("", None),
    ],
)
def test_lines(line, expected):
    assert read_bar(line) == expected


@given(st.text(max_size=300))
def test_any_log_is_a_bar_or_none(text):
    read_bar(text)
