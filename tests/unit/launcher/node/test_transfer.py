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


def made(script, **options):
    """Return the transfer that a script is, and the notes that it says."""
    notes = []
    argv = [sys.executable, "-c", SAY + script]
    return Transfer(argv, dict(os.environ), notes.append, **options), notes


async def test_notes_are_told_when_they_come_and_not_at_the_end():
    transfer, notes = made(
        """
say(note="a checkpoint is there")
say(progress={"bytes_done": 3})
sys.stdin.read()
say(done={"num_files": 1})
""",
        keeps_stdin=True,
    )
    await wait_until_async(lambda: notes, "the note")
    assert notes == ["a checkpoint is there"]
    await wait_until_async(lambda: transfer.progress, "the progress")
    assert transfer.progress == {"bytes_done": 3}
    assert transfer.child.poll() is None
    transfer.end_input()
    assert await transfer.finish() == {"num_files": 1}


async def test_who_says_much_before_the_end_is_not_held_up():
    """A task's checkpoints are uploaded for days; a pipe holds a thousand sentences."""

    script = 'for n in range(5000): say(note=f"checkpoint {n} uploaded")\nsys.stdin.read()\nsay(done={})\n'
    transfer, notes = made(script, keeps_stdin=True)
    await wait_until_async(lambda: len(notes) == 5000, "all notes")
    transfer.end_input()
    await transfer.finish()


async def test_an_error_has_the_words_of_the_other_process():
    parts = {"what": "access was denied", "where": "s3://b/a", "why": "403", "fix": None}
    transfer, _ = made(f"say(error={parts!r}); sys.exit(11)")
    with pytest.raises(MusterError) as caught:
        await transfer.finish()
    assert caught.value.parts() == parts


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("print('no JSON at all')", "exit code 0"),
        ("sys.exit('no such module')", "no such module"),
    ],
)
async def test_one_that_ends_without_a_message_has_failed(script, why):
    transfer, _ = made(script, log=lambda data: None)
    with pytest.raises(MusterError, match="ended without a message") as caught:
        await transfer.finish()
    assert caught.value.why == why


async def test_a_line_that_no_pipe_holds_is_read_whole():
    transfer, notes = made("say(note='a' * 300_000); say(done={})")
    await transfer.finish()
    assert notes == ["a" * 300_000]


async def test_it_does_not_outlive_who_waits_for_it():
    transfer, notes = made("say(note='here'); sys.stdin.read()", keeps_stdin=True)
    waiting = asyncio.create_task(transfer.finish())
    await wait_until_async(lambda: notes, "its start")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await wait_until_async(lambda: transfer.child.poll() == -9, "its end")
    assert read_process(transfer.child.pid) is None


async def test_a_long_transfer_says_how_far_it_is():
    script = """
say(progress={"bytes_done": 1 << 20, "total_bytes": 4 << 20})
sys.stdin.read()
say(done={})
"""

    transfer, notes = made(script, keeps_stdin=True)
    end = asyncio.create_task(transfer.finish_aloud("downloading x", say_every_s=0.01))
    said = "downloading x: 1 MiB of 4 MiB (25 %)"
    await wait_until_async(lambda: said in notes, "the words of its progress")
    transfer.end_input()
    assert await end == {}
