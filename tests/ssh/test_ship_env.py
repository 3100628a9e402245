"""`--ship-env`: the client's virtual environment on hosts that have none of it."""

import os
import subprocess
import sys

import pytest

from kit.waiting import wait_until

SAYS = """\
import os, sys, here_alone, being_edited
print("rank", os.environ["RANK"], here_alone.WORD, being_edited.WORD, "in", sys.prefix, flush=True)
import subprocess
print(subprocess.run(["tool"], capture_output=True, text=True, check=True).stdout, flush=True)
"""
WORDS = ("--hosts", "a,b,c", "--tee", "all")


@pytest.fixture(autouse=True)
def own_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def environment(hosts, tmp_path):
    """Make one with a package, a script, and an editable install from outside."""
    prefix = hosts.client / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    (site / "here_alone.py").write_text("WORD = 'shipped'\n")
    edited = hosts.client / "edited" / "src"
    edited.mkdir(parents=True)
    (edited / "being_edited.py").write_text("WORD = 'edited'\n")
    (site / "__editable__.edited.pth").write_text(f"{edited}\n")
    tool = prefix / "bin" / "tool"
    tool.write_text(
        f"#!{prefix}/bin/python\nimport here_alone; print('tool of', here_alone.WORD)\n"
    )
    tool.chmod(0o755)
    return prefix


@pytest.fixture
def three(hosts):
    homes = hosts.add_all(*"abc", rc='export TMPDIR="$HOME/tmp"\n')
    for home in homes:
        (home / "tmp").mkdir()
    (hosts.code / "says.py").write_text(SAYS)
    return homes


def places(homes):
    return [sorted(p.name for p in home.glob("tmp/muster-environments-*/*")) for home in homes]


def test_an_environment_goes_to_all_hosts_once_and_is_what_the_workers_run(
    hosts, three, environment
):
    words = (f"--ship-env={environment}", *WORDS, "says.py")
    out, err = hosts.must(*words)
    assert out.count("shipped edited in") == 3
    assert out.count("tool of shipped") == 3
    assert str(three[0] / "tmp") in out
    assert "has come to 3 hosts" in err
    assert "from here" not in err
    (name,) = places(three)[0]
    assert places(three) == [[name]] * 3

    out, err = hosts.must(*words)
    assert "has come" not in err
    assert out.count("shipped edited in") == 3

    (environment.parent / "edited" / "src" / "being_edited.py").write_text("WORD = 'anew'\n")
    out, err = hosts.must(*words)
    assert out.count("shipped anew in") == 3
    assert [len(found) for found in places(three)] == [2, 2, 2]


def test_an_environment_lies_in_the_scratch_of_its_site_and_is_pruned_there(
    hosts, three, environment
):
    for home in three:
        (home / "local-disk").mkdir()
    site = '[engines.lab]\nkind = "ssh"\nhosts = ["a", "b"]\nscratch = "$HOME/local-disk"\n'
    (hosts.code / "muster.toml").write_text(site)
    out, _ = hosts.must(f"--ship-env={environment}", "--on", "lab", "--tee", "all", "says.py")
    assert out.count("shipped edited in") == 2
    kept = [list(home.glob("local-disk/muster-environments-*/*")) for home in three]
    assert [len(found) for found in kept] == [1, 1, 0]
    assert places(three) == [[], [], []]
    out, _ = hosts.must("--hosts", "lab", "--older", "0s", "--yes", command="prune")
    assert not any(path.exists() for found in kept for path in found)


def test_a_host_that_has_it_sends_nothing(hosts, three, environment):
    words = (f"--ship-env={environment}", "--hosts", "a", "--run-id", "r", "says.py")
    _, err = hosts.must(*words)
    assert "has come to 1 host in" in err
    code, _, err = hosts.run("r", command="restart")
    assert code == 2, err
    assert "with --ship-env" in err
    words = ("--hosts", "a,b", "--older", "0s")
    out, err = hosts.must(*words, "--dry-run", command="prune")
    assert out.count("a: ") == 1
    assert "nothing was removed" in err
    assert len(places(three)[0]) == 1
    out, err = hosts.must(*words, command="prune")
    assert "freed" in err
    assert places(three)[0] == []
    _, err = hosts.must(f"--ship-env={environment}", "--hosts", "a", "says.py")
    out, err = hosts.must(f"--ship-env={environment}", *WORDS, "says.py")
    assert "has come to 2 hosts" in err
    assert out.count("shipped edited in") == 3


def test_two_runs_that_send_the_same_at_once_both_have_it_and_nothing_is_left(
    hosts, three, environment
):
    words = (f"--ship-env={environment}", "--hosts", "a,b", "--tee", "all", "says.py")
    runs = [hosts.start("--run-id", name, *words) for name in ("r1", "r2")]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert out.count("shipped edited in") == 2
    for home in three[:2]:
        (folder,) = home.glob("tmp/muster-environments-*")
        (name,) = [path.name for path in folder.iterdir()]
        assert not name.startswith(".")


@pytest.fixture
def large(environment):
    """Let it take a while."""
    (site,) = environment.glob("lib/python3*/site-packages")
    for number in range(6):
        (site / f"large{number}.bin").write_bytes(os.urandom(25_000_000))
    return environment


def is_coming_to(home):
    return any(home.glob("tmp/muster-environments-*/.unpacking-*/env/lib"))


def test_a_host_that_dies_while_it_forwards_is_passed_by(hosts, three, large):
    words = (f"--ship-env={large}", "--hosts", "a,b,c", "--nodes", "2:3", "--tee", "all")
    run = hosts.start(*words, "says.py")
    wait_until(lambda: is_coming_to(three[2]), "the third host gets it", 120.0)
    hosts.cut("b", for_good=True)
    out, err = run.communicate(timeout=300)
    assert "c gets the environment from here: not from b" in err, err
    assert run.returncode == 0, err
    assert out.count("shipped edited in") == 2


def test_a_client_that_is_killed_in_the_middle_leaves_nothing_that_is_used(hosts, three, large):
    run = hosts.start(f"--ship-env={large}", "--hosts", "a,b", "says.py")
    wait_until(lambda: is_coming_to(three[1]), "the second host gets it", 120.0)
    run.kill()
    run.communicate()
    wait_until(lambda: not is_coming_to(three[0]), "the first host gives it up", 60.0)
    out, _ = hosts.must(f"--ship-env={large}", "--hosts", "a,b", "--tee", "all", "says.py")
    assert out.count("shipped edited in") == 2
    assert [len(found) for found in places(three)] == [1, 1, 0], places(three)


def test_a_damaged_copy_of_it_is_never_used(hosts, three, environment):
    _, err = hosts.must(f"--ship-env={environment}", "--hosts", "a", "says.py")
    for archive in hosts.home.glob("cache/environment-*.parcel"):
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 1
        archive.write_bytes(data)
    code, _, err = hosts.run(f"--ship-env={environment}", "--hosts", "b", "says.py")
    assert code == 5, err
    assert "the kept archive of the environment is damaged" in err
    wait_until(lambda: places(three)[1] == [], "the host gives up what it has of it", 60.0)
    _, err = hosts.must(f"--ship-env={environment}", "--hosts", "b", "says.py")


def test_an_environment_that_does_not_work_there_stops_the_run(hosts, three, environment):
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise OSError('libcudart is missing')\n")
    code, _, err = hosts.run(f"--ship-env={environment}", *WORDS, "says.py")
    assert code == 5, err
    assert "`import torch` fails" in err
    assert "libcudart is missing" in err
