"""The voice speaks on this process's own streams, so each test speaks in a process of its own."""

import os
import re
import select
import subprocess
import sys

from kit.command import SOURCE
from kit.screen import TerminalOf

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
WORDS = [sys.executable, "-S", "-c"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE}
PROLOGUE = """
import os, sys
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model.events import event_of
voice = TerminalVoice()
voice.start()
"""


def start(program, *arguments, **streams):
    return subprocess.Popen([*WORDS, PROLOGUE + program, *arguments], env=ENVIRONMENT, **streams)


def on_terminal(program, **given):
    return TerminalOf([*WORDS, PROLOGUE + program], {**ENVIRONMENT, **given})


def said(program):
    with start(program, **PIPES) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


def test_output_goes_to_the_stream_that_it_came_from():
    out, err = said("voice.show(0, 1, 'out\\n', 0); voice.show(0, 2, 'err\\n', 0); voice.flush(10)")

    assert (out, err) == ("out\n", "err\n")


def test_a_sentence_of_muster_stands_on_a_line_of_its_own():
    out, err = said("voice.show(0, 2, '10%', 0); voice.say('one\\ntwo'); voice.flush(10)")

    assert (out, err) == ("", "10%\nmuster: one\nmuster: two\n")


TRANSFER = """
for done in range(1, 6):
    text = f"staging /data: {done} GiB of 9 GiB (11 %), 1 GiB/s, {9 - done} s left"
    voice.tell(event_of("notice", {"node": "n1", "text": text}))
voice.say("staged"); voice.flush(10)
"""


def test_after_a_loss_of_logs_no_log_is_said_to_have_what_is_not_shown():
    out, err = said(
        "voice.show(0, 1, '', 2)\n"
        "lost = {'text': 'logs are being lost on n1', 'logs_lost_lines': 9}\n"
        "voice.tell(event_of('notice', lost))\n"
        "voice.show(0, 1, '', 3); voice.flush(10)"
    )

    assert (out, err.splitlines()) == (
        "",
        [
            "[rank 0: 2 lines are not shown here; see its log]",
            "muster: logs are being lost on n1",
            "[rank 0: 3 lines are not shown here; not all are in its log]",
        ],
    )


def test_in_a_log_a_transfer_is_told_once():
    _, err = said(TRANSFER)
    assert err.splitlines() == [
        "muster: staging /data: 1 GiB of 9 GiB (11 %), 1 GiB/s, 8 s left",
        "muster: staged",
    ]


def test_on_a_terminal_a_transfer_is_told_again_and_again():
    with on_terminal(TRANSFER) as screen:
        screen.wait_for("5 GiB of 9 GiB", "4 s left", "muster: staged")
        assert screen.text.count("GiB of 9 GiB") == 5


def test_a_report_is_printed_as_it_is():
    _, err = said("voice.show(0, 2, 'half', 0); voice.print('error: x\\n'); voice.flush(10)")

    assert err == "half\nerror: x\n"


def test_half_lines_are_printed_at_the_end():
    out, _ = said("voice.show(0, 1, 'a\\n', 0); voice.show(1, 1, 'half', 0); voice.flush(10)")

    assert out == "a\n[rank 1] half\n"


def test_half_a_line_among_several_ranks_appears_while_its_rank_goes_on():
    with start(
        "voice.show(0, 1, 'a\\n', 0); voice.show(1, 1, '\\r10%', 0); sys.stdin.read(1)",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        seen = b""
        while not seen.endswith(b"10%"):
            part = os.read(process.stdout.fileno(), 100)
            assert part, seen
            seen += part
        process.communicate(b"end", timeout=60)

    assert seen == b"a\n[rank 1] 10%"


def test_a_sentence_with_words_of_others_is_shown_and_not_obeyed():
    _, err = said("voice.say('n1\\x1b]0;owned\\x07 was lost'); voice.flush(10)")

    assert err == "muster: n1\\x1b]0;owned\\x07 was lost\n"


FAILS = """
traceback = 'Traceback (most recent call last):\\n  File "t", line 1, in f\\n    f()\\nE: x\\n'
from torchmuster.core.model.failure import EndKind, PythonError, WorkerEnd
from torchmuster.core.model.events import AttemptFailedEvent, AttemptStartedEvent
error = PythonError(type_name="E", message="x", where=None, traceback=traceback)
more = {"node": "n1", "kind": EndKind.EXCEPTION, "asked": False, "elapsed_s": 1.0, "error": error}
for attempt in (0, 1):
    voice.tell(AttemptStartedEvent(attempt=attempt, num_nodes=1, world_size=4, why="y"))
    voice.show(0, 2, "0\\n", 0)
    tail = tuple(traceback.splitlines())
    cause = WorkerEnd(attempt=attempt, rank=3, local_rank=3, tail=tail, **more)
    voice.tell(AttemptFailedEvent(attempt=attempt, what="E in rank 3", restarts_left=1, cause=cause))
print(voice.shown.has(traceback))
voice.flush(10)
"""


def test_a_failure_that_comes_again_shows_the_lines_of_a_rank_once():
    out, err = said(FAILS)

    assert out == "True\n"
    assert err.count("  [rank 3] E: x\n") == 1
    assert err.count("ended: E in rank 3; 1 restart left") == 2


FLOOD = """
for i in range(400):
    voice.show(0, 1, ('%08d\\n' % i) * 1000, 0)
voice.say('the run failed')
voice.print('error: a verdict\\n')
os.close(int(sys.argv[1]))
sys.stdin.read(1)
voice.flush(30)
voice.show(0, 1, 'end\\n', 0)
voice.flush(30)
"""


def say_a_flood():
    """Return what is read from a process after it has said 3.6 MB to a terminal that nobody read."""
    said_all, done = os.pipe()
    with start(FLOOD, str(done), **PIPES, pass_fds=[done]) as process:
        os.close(done)
        # It takes a second. Whoever waits for a reader, if only a tenth of a second with each block, is not done then.
        ended, _, _ = select.select([said_all], [], [], 30.0)
        os.close(said_all)
        assert ended, "it waits for a reader"
        out, err = process.communicate(b"go", timeout=60)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


def test_a_terminal_that_nobody_reads_never_blocks_and_is_told_what_it_lost_and_the_verdict():
    out, err = say_a_flood()

    lines = out.splitlines()
    assert lines.pop() == "end"
    assert all(len(line) == 8 for line in lines)
    assert 1 << 20 > 9 * len(lines) - 65536 > 0.9 * (1 << 20)
    # The pipe takes its first 64 KB when the thread comes to it, so the flood may lose in two parts.
    lost = re.findall(
        r"^muster: (\d+) lines were not shown: this terminal is slow$", err, re.MULTILINE
    )
    assert sum(map(int, lost)) == 400_000 - len(lines)
    assert "muster: the run failed\nerror: a verdict\n" in err


def test_a_reader_that_has_gone_ends_nothing():
    with start(
        "os.write(2, b'ready'); sys.stdin.read(1); voice.show(0, 1, 'x' * 100000, 0);"
        " voice.say('still here'); voice.flush(30)",
        **PIPES,
    ) as process:
        process.stdout.close()
        process.stdin.write(b"go")
        process.stdin.close()
        err = process.stderr.read()
        process.wait(60)

    assert process.returncode == 0
    assert err == b"readymuster: still here\n"


DRAWN_AT_THE_END = """
voice.say("cancelled")
voice.show_status(["running"])
with voice._changed:
    assert voice._changed.wait_for(lambda: voice._status.is_drawn and not voice._busy, 30)
voice.flush(30.0)
"""


def test_rows_that_stand_below_the_last_words_go_at_the_end():
    with on_terminal(DRAWN_AT_THE_END, TERM="xterm") as screen:
        assert screen.wait_for_end(limit_s=20) == 0
        assert screen.text.split() == ["muster:", "cancelled"]
