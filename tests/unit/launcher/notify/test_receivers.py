"""Who gets notices: what may be written where, and that no error shows an address."""

import contextlib

import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.notify.receivers import Receiver, Receivers, find, parse

HOOK = "https://hooks.example.org/services/T0/B0/secret"


@pytest.fixture
def environment(tmp_path):
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def write(path, text, mode=0o600):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_has_a_receiver_on_each_line_and_the_longest_wait(tmp_path, environment):
    text = f"# team\n{HOOK}\n\nmailto:me@example.org\nwait=1h\nnotify-send 'a run'\n"
    path = write(tmp_path / "who", text)

    found = find(f"@{path}", str(tmp_path), environment)

    labels = ["hooks.example.org", "m...@example.org", "notify-send"]
    assert [one.label for one in found.all] == labels
    assert found.wait_s == 3600
    assert parse(found.as_text(), "again") == found


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path, environment, mode):
    path = write(tmp_path / "who", HOOK, mode)

    with pytest.raises(UsageError, match="others can read") as error:
        find(f"@{path}", str(tmp_path), environment)

    assert error.value.fix == f"chmod 600 {path}"


@pytest.mark.parametrize("word", [HOOK, "mailto:me@example.org", "/bin/tell"])
def test_the_command_line_takes_no_receiver_and_the_error_does_not_repeat_it(
    tmp_path, environment, word
):
    with pytest.raises(UsageError) as error:
        find(word, str(tmp_path), environment)

    assert word not in f"{error.value.what}{error.value.where}{error.value.why}{error.value.fix}"


def test_a_name_is_looked_for_in_both_site_files(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "secret", HOOK)
    write(tmp_path / "config/muster/config.toml", '[notify]\nme = "@~/secret"\n', 0o644)
    write(tmp_path / "muster.toml", '[notify]\nteam = ["tell team", "mailto:a@b"]\n', 0o644)
    mine = find("me", str(tmp_path), environment)
    team = find("team", str(tmp_path), environment)

    assert mine == Receivers((Receiver(HOOK),))
    assert [one.label for one in team.all] == ["tell", "a...@b"]
    with pytest.raises(UsageError, match="has `taem`") as error:
        find("taem", str(tmp_path), environment)
    assert "team" in error.value.fix


def test_an_address_in_a_site_file_that_others_read_is_refused(tmp_path, environment):
    path = write(tmp_path / "muster.toml", f'[notify]\nteam = "{HOOK}"\n', 0o644)

    with pytest.raises(UsageError, match="others can read"):
        find("team", str(tmp_path), environment)
    path.chmod(0o600)
    assert find("team", str(tmp_path), environment).all == (Receiver(HOOK),)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "there is no receiver"),
        ("# nobody\n", "there is no receiver"),
        ("tell\n" + "\n".join(f"tell {n}" for n in range(8)), "there are 9 receivers"),
        ("ftp://example.org/x", "this line is no receiver"),
        ("https:///path", "this line is no receiver"),
        ("https://host:port/", "this line is no receiver"),
        ("mailto:-f@x", "this line is no receiver"),
        ("mailto:a b@c", "this line is no receiver"),
        ("tell 'x", "this line is no receiver"),
        ("tell\x07", "this line is no receiver"),
        ("hooks.example.org/services/T0/secret", "this line is no receiver"),
        ("//hooks.example.org/services/T0/secret", "this line is no receiver"),
        ("wait=soon\ntell", "this is no time"),
    ],
)
def test_lines_that_are_no_receivers(text, what):
    with pytest.raises(UsageError, match=what) as error:
        parse(text, "who")
    assert error.value.where.startswith("who")
    assert "secret" not in f"{error.value.what}{error.value.why}{error.value.fix}"


@pytest.mark.parametrize("wait", ["12d", "0.01s", "1h30m", "90"])
def test_what_is_written_into_the_run_is_read_again(wait):
    found = parse(f"tell\nwait={wait}", "who")
    assert parse(found.as_text(), "run").wait_s == pytest.approx(found.wait_s, abs=1e-3)


def test_the_wait_of_a_site_is_kept_and_a_broken_site_file_is_named(tmp_path, environment):
    path = write(tmp_path / "muster.toml", '[notify]\nteam = ["tell", "wait=5m"]\n', 0o644)
    assert find("team", str(tmp_path), environment).wait_s == 300
    path.write_text("[notify\n")
    with pytest.raises(UsageError) as error:
        find("team", str(tmp_path), environment)
    assert f"{path} can't be read" in error.value.why


def test_a_login_in_an_address_is_sent_as_a_header(monkeypatch):
    asked = []

    class Opener:
        def open(self, request, timeout):
            asked.append((request.full_url, request.get_header("Authorization")))
            return contextlib.nullcontext()

    monkeypatch.setattr("urllib.request.build_opener", lambda *_: Opener())
    notice = {"id": "a/b", "text": "t"}
    assert Receiver("https://me:p%40ss@ntfy.example.org/x").deliver(notice) == ""
    assert asked == [("https://ntfy.example.org/x", "Basic bWU6cEBzcw==")]


def test_a_proxy_without_a_scheme_is_asked_for(monkeypatch):
    called = []
    monkeypatch.setenv("https_proxy", "proxy.example.org:3128")
    monkeypatch.delenv("no_proxy", raising=False)

    def connect(address, timeout):
        called.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", connect)
    assert Receiver(HOOK).unreachable() == "Connection refused"
    assert called == [("proxy.example.org", 3128)]


def test_a_command_that_is_not_here_is_not_reached():
    assert Receiver("no-such-program-of-mine x").unreachable()
    assert not Receiver("cat").unreachable()


def test_a_command_gets_the_text_and_the_id_and_its_end_counts(tmp_path):
    notice = {"id": "run/end-1", "text": "muster: it ended"}
    told = tmp_path / "told"
    text = f'#!/bin/sh\n(echo "$MUSTER_NOTICE_ID"; cat) > {told}\n'
    script = write(tmp_path / "tell", text, 0o700)

    assert Receiver(str(script)).deliver(notice) == ""
    assert told.read_text() == "run/end-1\nmuster: it ended\n"
    assert "exit code 1" in Receiver("false").deliver(notice)
    assert Receiver("no-such-program-of-mine").deliver(notice)
