"""The bytes of terminals become keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.report.cli.top_screen import read_keys


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[1~", ["page-up", "page-down", "home", "end", "home"]),
        (b"\x1b", ["escape"]),
        (b"\r\x7f\x03", ["enter", "backspace", "ctrl-c"]),
        (b"\x1b[1;5Cx", ["x"]),  # control and a cursor key: no name here
        ("ü".encode(), ["ü"]),
        (b"\xff\x01", []),
    ],
)
def test_keys(data, keys):
    assert read_keys(data) == keys


@given(st.binary(max_size=40))
def test_any_bytes_make_keys_or_nothing(data):
    assert all(isinstance(key, str) and key for key in read_keys(data))
