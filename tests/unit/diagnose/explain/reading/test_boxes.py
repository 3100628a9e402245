"""Tracebacks and rows as rich draws them."""

from torchmuster.diagnose.explain.reading.scan import undrawn
from unit.diagnose.explain.logs import explain

BOX = """\
epoch 0
╭─────────────── Traceback (most recent call last) ────────────────╮
│ /home/u/fit.py:6 in <module>                                     │
│                                                                  │
│   5 │   print("epoch 0")                                         │
│ ❱ 6 main()                                                       │
│                                                                  │
│ /home/u/fit.py:3 in load                                         │
│                                                                  │
│ ❱ 3 def load(path): return open(path)                            │
│ ╭────────── locals ──────────╮                                   │
│ │ path = '/lustre/projects/' │                                   │
│ ╰────────────────────────────╯                                   │
╰──────────────────────────────────────────────────────────────────╯
FileNotFoundError: [Errno 2] No such file or directory:
'/lustre/projects/speech/features/mel80/train-clean-460/shard-00017.
tar'
"""
ROWS = """\
[11/23/26 04:00:13] INFO     starting with 8 workers                    save.py:6
                    ERROR    Could not write the checkpoint to          save.py:7
                             /lustre/projects/multilingual/checkpoints/
                             run-17/step-009000: [Errno 28] No space
                             left on device:
                             '/lustre/projects/multilingual/checkpoints
                             /run-17/step-009000/optimizer.pt'
"""


def test_a_traceback_in_a_box_is_read_with_its_frames_and_its_wrapped_message(tmp_path):
    first = explain(tmp_path, job=BOX).first
    assert first.cause == "file-missing"
    assert first.at == "/home/u/fit.py:3"
    assert first.error.endswith("/train-clean-460/shard-00017.tar")


def test_rows_of_a_logger_are_one_message(tmp_path):
    first = explain(tmp_path, job=ROWS).first
    assert first.cause == "disk-full"
    assert "/checkpoints/run-17/step-009000/optimizer.pt" in first.error


def test_what_is_no_box_stays_as_it_is():
    assert undrawn("epoch 1 ─ loss 2.0") == "epoch 1 ─ loss 2.0"
    assert undrawn("  12%|█████     | 3/25 │ left") == "  12%|█████     | 3/25 │ left"
