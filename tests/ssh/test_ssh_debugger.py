"""An editor of this machine and a rank on a host of ssh that has a copy of the code: breakpoints lead from one to the other."""

import json
import os
import sys

import pytest

from kit.dap import Editor
from kit.waiting import wait_until

LIMIT_S = 120.0
TRAIN = """\
import os
import here
rank = int(os.environ["RANK"])
answer = here.double(20 + rank)
print("the answer", answer, "in", os.getcwd(), flush=True)
"""
MODULE = """\
def double(number):
    twice = 2 * number
    return twice
"""
LINE = 3  # of the module: `return twice`


def test_an_editor_stops_a_rank_in_the_copy_of_the_code_on_its_host(hosts):
    pytest.importorskip("debugpy")
    homes = [hosts.add(name) for name in ("a", "b")]
    (hosts.code / "train.py").write_text(TRAIN)
    (hosts.code / "here.py").write_text(MODULE)
    words = ("--hosts", "a,b", "--python", sys.executable, "--tee", "all", "--debugpy", "1")
    client = hosts.start(*words, "train.py", MUSTER_PROGRESS="off")
    said = bytearray()
    os.set_blocking(client.stderr.fileno(), False)

    def heard():
        said.extend(client.stderr.buffer.read() or b"")
        return b"\n}\n" in said or client.poll() is not None

    wait_until(heard, "launch.json", LIMIT_S)
    text = said.decode()
    assert "rank 1 on b waits for debugpy" in text
    launch, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])
    (configuration,) = launch["configurations"]
    (mapping,) = configuration["pathMappings"]
    assert mapping["localRoot"] == str(hosts.code)
    assert mapping["remoteRoot"].startswith(f"{homes[1]}/.muster/runs/")
    with Editor(configuration["connect"]["port"]) as editor:
        editor.attach(configuration["pathMappings"], {hosts.code / "here.py": [LINE]})
        thread = editor.wait_for("stopped")["threadId"]
        frames = editor.ask("stackTrace", threadId=thread)["stackFrames"]
        assert (frames[0]["line"], frames[0]["source"]["path"]) == (
            LINE,
            str(hosts.code / "here.py"),
        )
        assert frames[1]["source"]["path"] == str(hosts.code / "train.py")
        found = editor.ask("evaluate", expression="twice", frameId=frames[0]["id"], context="repl")
        assert found["result"] == "42"
        editor.ask("continue", threadId=thread)
        out, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 0, said.decode()
    assert f"the answer 42 in {homes[1]}/.muster/runs/" in out
    assert "the answer 40 in" in out
