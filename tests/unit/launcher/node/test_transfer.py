"""What an agent hears of a process that moves files: while it works, and at its end. The process here is a few lines."""

import asyncio
import os
import sys

import pytest

from kit.waiting import wait_until_async
from torchmuster.core.proc import read_process
from torchmuster.errors import MusterError
from torchmuster.launcher.node.shell import Transfer

SAY = """
import json, sys
def say(**message):
    print(json.dumps(message), flush=True)
"""


def play(story, script, **options):
    """Run a story with the transfer that a script is, and the notes that it says."""

    async def go():
        notes = []
        argv = [sys.executable, "-c", SAY + script]
        return await story(Transfer(argv, dict(os.environ), notes.append, **options), notes)

    return asyncio.run(go())


def test_notes_are_told_when_they_come_and_not_at_the_end():
    async def story(transfer, notes):
        await wait_until_async(lambda: notes, "the note")
        assert notes == ["a checkpoint is there"]
        await wait_until_async(lambda: transfer.progress, "the progress")
        assert transfer.progress == {"bytes_done": 3}
        assert transfer.child.poll() is None
        transfer.end_input()
        assert await transfer.finish() == {"num_files": 1}

    play(
        story,
        """
say(note="a checkpoint is there")
say(progress={"bytes_done": 3})
sys.stdin.read()
say(done={"num_files": 1})
""",
        keeps_stdin=True,
    )


def test_who_says_much_before_the_end_is_not_held_up():
    """A task's checkpoints are uploaded for days; a pipe holds a thousand sentences."""

    async def story(transfer, notes):
        await wait_until_async(lambda: len(notes) == 5000, "all notes")
        transfer.end_input()
        await transfer.finish()

    script = 'for n in range(5000): say(note=f"checkpoint {n} uploaded")\nsys.stdin.read()\nsay(done={})\n'
    play(story, script, keeps_stdin=True)


def test_an_error_has_the_words_of_the_other_process():
    async def story(transfer, notes):
        with pytest.raises(MusterError) as caught:
            await transfer.finish()
        return caught.value.parts()

    parts = {"what": "access was denied", "where": "s3://b/a", "why": "403", "fix": None}
    assert play(story, f"say(error={parts!r}); sys.exit(11)") == parts


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("print('no JSON at all')", "exit code 0"),
        ("sys.exit('no such module')", "no such module"),
    ],
)
def test_one_that_ends_without_a_message_has_failed(script, why):
    async def story(transfer, notes):
        with pytest.raises(MusterError, match="ended without a message") as caught:
            await transfer.finish()
        return caught.value.why

    assert play(story, script, log=lambda data: None) == why


def test_a_line_that_no_pipe_holds_is_read_whole():
    async def story(transfer, notes):
        await transfer.finish()
        return notes

    assert play(story, "say(note='a' * 300_000); say(done={})") == ["a" * 300_000]


def test_it_does_not_outlive_who_waits_for_it():
    async def story(transfer, notes):
        waiting = asyncio.create_task(transfer.finish())
        await wait_until_async(lambda: notes, "its start")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await wait_until_async(lambda: transfer.child.poll() == -9, "its end")
        assert read_process(transfer.child.pid) is None

    play(story, "say(note='here'); sys.stdin.read()", keeps_stdin=True)


def test_a_long_transfer_says_how_far_it_is():
    script = """
say(progress={"bytes_done": 1 << 20, "total_bytes": 4 << 20})
sys.stdin.read()
say(done={})
"""

    async def story(transfer, notes):
        end = asyncio.create_task(transfer.finish_aloud("downloading x", say_every_s=0.01))
        said = "downloading x: 1 MiB of 4 MiB (25 %)"
        await wait_until_async(lambda: said in notes, "the words of its progress")
        transfer.end_input()
        assert await end == {}

    play(story, script, keeps_stdin=True)
