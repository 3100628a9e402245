from torchmuster.core.files.layout import last_lines


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(str(log), 2) == ["line 99998", "line 99999"]
    assert len(last_lines(str(log), 1000, num_bytes=55)) == 5


def test_a_log_that_is_not_there_has_no_lines(tmp_path):
    assert last_lines(str(tmp_path / "no"), 3) == []


def test_of_a_progress_bar_the_last_state_is_a_line(tmp_path):
    (tmp_path / "x").write_bytes(b"begin\r\n\r 1%\r 2%\nend")
    assert last_lines(str(tmp_path / "x"), 3) == ["begin", " 2%", "end"]


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\n")
    assert last_lines(str(tmp_path / "x"), 3) == ["\ufffd"]
