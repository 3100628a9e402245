"""An agent answers for its node once it knows facts and torch."""

from dataclasses import replace

import pytest

from kit.values import program
from kit.waiting import wait_until_async
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.net import messages
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.inquiries import FactsServer, script_path

PROGRAM = program("train.py", cwd="/home/u")
LIMIT_S = 90.0


@pytest.mark.parametrize("torch_first", [True, False])
async def test_facts_are_sent_once_with_the_torch_of_the_spawner(tmp_path, torch_first):
    sent = []
    desk = FactsServer(sent.append)
    if torch_first:
        desk.take_torch({"torch": "2.13.0", "is_known": True})
    desk.take(part_messages.AskFacts(), PROGRAM, {}, RunDir(str(tmp_path)))
    if not torch_first:
        await wait_until_async(lambda: desk._facts is not None)
        assert sent == []
        desk.take_torch({"torch": "2.13.0", "is_known": True})
    await wait_until_async(lambda: sent)
    desk.take_torch({})  # a later word does not count
    (said,) = sent
    assert said.facts["torch"]["torch"] == "2.13.0"
    assert said.facts["system"]["num_cpus"] >= 1
    assert said.asked_at <= said.sent_at
    assert messages.decode(messages.encode(said)) == said


async def test_an_agent_that_is_asked_again_answers_again(tmp_path):
    sent = []
    desk = FactsServer(sent.append)
    desk.take_torch({})
    for number in (1, 2):
        desk.take(part_messages.AskFacts(), PROGRAM, {}, RunDir(str(tmp_path)))
        await wait_until_async(lambda number=number: len(sent) == number)


def test_the_script_is_looked_for_where_the_program_runs():
    assert script_path(PROGRAM, None) == "/home/u/train.py"
    assert script_path(PROGRAM, "other.py") == "/home/u/other.py"
    assert script_path(replace(PROGRAM, kind=ScriptKind.MODULE), None) is None
