import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model import text as texts
from torchmuster.errors import MusterError


def test_an_error_is_printed_in_its_four_parts():
    error = MusterError("it broke", where="a.py:1", why="first\n\n  second", fix="mend it")

    assert texts.render_report(texts.report_of_error(error)) == (
        "error: it broke\n  at: a.py:1\n  because: first\n\n      second\nhint: mend it\n"
    )


def test_parts_that_are_unknown_are_left_out():
    assert (
        texts.render_report(texts.report_of_error(MusterError("it broke"))) == "error: it broke\n"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext, ünïcode 漢字\n", "plain\ttext, ünïcode 漢字\n"),
        ("\x1b]0;owned\x07title", "\\x1b]0;owned\\x07title"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2Jgone\x9b2J", "\\x1b[2Jgone\\x9b2J"),
        ("10%\r20%\x08", "10%\\x0d20%\\x08"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("a\ud800b", "a\\ud800b"),  # half a character
    ],
)
def test_a_terminal_obeys_nothing_in_a_text_of_others(text, shown):
    assert texts.printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("a\x1b[2Kb\x1b[1A\x1b[?25lc", "abc"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]52;c;aGk=\x1b\\", "\\x1b]52;c;aGk=\\x1b\\"),
        ("\x1bc\x9b31m", "\\x1bc\\x9b31m"),
        ("10%\r20%\n\ttab", "10%\r20%\n\ttab"),
        ("\udcff", "\\udcff"),
    ],
)
def test_of_what_a_rank_wrote_a_terminal_gets_the_colours_only(text, shown):
    assert texts.as_output(text) == shown


@given(st.binary())
def test_the_bytes_of_a_rank_come_back_whatever_they_are(written):
    assert texts.as_bytes(written.decode(errors="surrogateescape")) == written


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_written(text):
    assert isinstance(texts.as_bytes(text), bytes)
    assert not {"\x9b", "\x07", "\x08"} & set(texts.as_output(text))


def test_a_report_is_printable_in_all_of_its_parts():
    bad = "\x1b]0;owned\x07"
    error = MusterError(bad, where=bad, why=bad, fix=bad)

    assert texts.render_report(texts.report_of_error(error)).count("\\x1b]0;owned\\x07") == 4


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["a"], "a"), (["a", "b\n"], "a, b\\n"), (list("abcd"), "a, b and 2 more")],
)
def test_of_many_names_a_few_are_shown_with_how_many_there_are_more(names, shown):
    assert texts.few_of(names, 2) == shown


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (30 << 30, "30 GiB"),
        (1 << 40, "1 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(size_bytes, text):
    assert texts.show_size(size_bytes) == text


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "before", "words"),
    [
        (0, 0, 0.0, 0, "0 B"),
        (3 << 30, 12 << 30, 6.0, 0, "3 GiB of 12 GiB (25 %), 512 MiB/s, 18 s left"),
        (3 << 30, 12 << 30, 0.5, 0, "3 GiB of 12 GiB (25 %)"),
        (3 << 30, None, 6.0, 0, "3 GiB, 512 MiB/s"),
        (3 << 30, 12 << 30, 4.0, 2 << 30, "3 GiB of 12 GiB (25 %), 256 MiB/s, 36 s left"),
        (1 << 20, 1 << 40, 1.0, 0, "1 MiB of 1 TiB (0 %), 1 MiB/s, 291:16:15 left"),
        (13 << 30, 12 << 30, 6.0, 0, "13 GiB of 12 GiB (100 %), 2.167 GiB/s, 0 s left"),
        (-5, 100, 3.0, 0, "0 B of 100 B (0 %)"),
    ],
)
def test_a_transfer_says_how_much_how_fast_and_how_long_still(
    done, total, elapsed_s, before, words
):
    assert texts.show_transfer(done, total, elapsed_s, before_bytes=before) == words
    told = total is not None or elapsed_s >= 1.0
    assert texts.transfer_in(f"n2: staging /data: {words}") == (
        "n2: staging /data" if told and total != 0 else None
    )


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 60), st.floats(0.0, 1e6))
def test_what_is_moved_is_read_from_any_words_on_it(done, total, elapsed_s):
    assert texts.transfer_in(f"a: {texts.show_transfer(done, total, elapsed_s)}") == "a"


@pytest.mark.parametrize(
    "text", ["rank 3 failed", "copied 3 files (2 MiB) to 2 hosts", "size: 3 GiB", ""]
)
def test_other_sentences_move_nothing(text):
    assert texts.transfer_in(text) is None


# Secrets.


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "--hf-token",
        "--token",
        "password",
        "AWS_SECRET_ACCESS_KEY",
        "db_passwd",
        "SECRET",
    ],
)
def test_names_of_secrets_are_known(name):
    assert texts.is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["--num-tokens", "tokenizer", "--max-token-length", "OMP_NUM_THREADS", "--key-dim", "PATH"],
)
def test_names_of_training_are_no_secrets(name):
    assert not texts.is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        'password = "hunter22"',
        "api_key: 'abcdef123'",
        "https://me:hunter22@host/x",
        "ghp_" + "a1" * 18,
        "AKIA" + "ABCDEFGH12345678",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter22\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_a_text_are_hidden(text):
    assert texts.HIDDEN in texts.hide_secrets(text)
    assert not {"hunter22", "abcdef123"} & set(texts.hide_secrets(text).split("'"))
    assert "hunter22" not in texts.hide_secrets(text)


@pytest.mark.parametrize(
    "text", ["pad_token = 0", "tokens = x['tokens']", "secret = secrets.token_hex()", "a: int = 3"]
)
def test_code_stays_as_it_is(text):
    assert texts.hide_secrets(text) == text
