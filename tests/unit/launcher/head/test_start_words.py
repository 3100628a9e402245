"""A wait at the start in one sentence: who waits, for whom, at which store."""

import pytest

from torchmuster.launcher.facts.stacks import Frame, RankActivity, StackReading
from torchmuster.launcher.head.hang_monitor import StartLook, is_elsewhere, tell_start
from torchmuster.launcher.model.progress import RankStack, StoreCall

STORE = "10.0.0.1:43211"
MEETS = StackReading(
    doing=RankActivity.WAITS,
    what="init_process_group",
    frame=Frame(file="/u/train.py", line=12, name="<module>"),
)
LOADS = StackReading(
    doing=RankActivity.WORKS,
    what="download()",
    frame=Frame(file="/u/data.py", line=30, name="download"),
)


def look(rank, standing=MEETS, rest_s=12.0, **more):
    return StartLook(rank=rank, node=f"n{rank + 1}", standing=standing, rest_s=rest_s, **more)


def test_the_rank_that_does_not_come_is_named_with_its_place():
    told = tell_start([look(1), look(2), look(3)], [look(0, LOADS)], {}, STORE)
    assert told == (
        "ranks 1-3 wait in init_process_group (train.py:12) since 12 s"
        " for rank 0 on n1, which is in download() (data.py:30)"
    )


def test_code_outside_of_functions_is_named_by_its_line():
    module = StackReading(
        doing=RankActivity.WORKS,
        what="<module>",
        frame=Frame(file="/u/train.py", line=5, name="<module>"),
    )
    told = tell_start([look(1)], [look(0, module, source="name = input()")], {}, STORE)
    assert told.endswith("for rank 0 on n1, which is at `name = input()` (train.py:5)")
    assert "..." in tell_start([look(1)], [look(0, module, source="x" * 200)], {}, STORE)


def test_several_that_do_not_come_are_grouped_and_those_that_ended_are_told_of():
    others = [look(1, LOADS), look(2, LOADS)]
    told = tell_start([look(3)], others, {0: "exit code 0"}, STORE)
    assert "rank 3 waits in" in told
    assert "for ranks 1-2, which are in download() (data.py:30)" in told
    assert told.endswith(", and for rank 0, which has ended (exit code 0)")


def test_more_groups_than_a_sentence_holds_are_counted():
    others = [
        look(rank, StackReading(doing=RankActivity.WORKS, what=f"f{rank}()"))
        for rank in range(1, 6)
    ]
    assert tell_start([look(0)], others, {}, STORE).endswith("and for 2 more")


def test_all_that_wait_in_vain_are_asked_for_rank_and_world_size():
    told = tell_start([look(0), look(1)], [], {}, STORE)
    assert "though all of this attempt have come; do rank= and world_size= there" in told
    assert "all of this attempt" not in tell_start([look(0)], [], {}, STORE)


LINES = (
    'train.py:2: os.environ["MASTER_ADDR"] = other',
    'train.py:3: os.environ["MASTER_PORT"] = "29501"',
)


@pytest.mark.parametrize(
    ("call", "does", "lines"),
    [
        (
            StoreCall(named="10.0.0.1:29501", lines=LINES),
            "calls 10.0.0.1:29501, where no",
            LINES[1:],
        ),
        (StoreCall(calling=("10.9.9.9:77",), lines=LINES), "calls 10.9.9.9:77, where no", LINES),
        (StoreCall(connected=("10.9.9.9:5",)), "has no connection to the store of this run", ()),
    ],
)
def test_who_calls_another_store_is_told_both_addresses(call, does, lines):
    told = tell_start([look(0), look(1, store=call)], [], {}, STORE)
    assert f"; rank 1 {does}" in told
    shown = "".join(f" `{line}`" for line in lines)
    assert told.endswith(f"{STORE} (MASTER_ADDR, MASTER_PORT): does the script set its own?{shown}")
    assert "world_size" not in told


@pytest.mark.parametrize(
    ("call", "elsewhere"),
    [
        (StoreCall(), True),
        (StoreCall(connected=("10.0.0.1:43211",)), False),
        (StoreCall(connected=("127.0.0.1:43211",)), False),
        (StoreCall(connected=("10.0.0.1:29501",)), True),
        (StoreCall(calling=(STORE,)), False),
        (StoreCall(calling=("10.9.9.9:43211",)), True),
        (StoreCall(named=STORE), False),
    ],
)
def test_a_connection_to_the_runs_own_store_is_none_elsewhere(call, elsewhere):
    assert is_elsewhere(call, STORE) is elsewhere
    assert not is_elsewhere(call, "")


def test_a_look_reads_the_stack():
    text = (
        "Current thread 0x01 (most recent call first):\n"
        '  File "/e/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 1 in'
        " _create_c10d_store\n"
        '  File "/e/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2 in'
        " init_process_group\n"
        '  File "/u/train.py", line 12 in <module>\n'
    )
    call = StoreCall(named="x:1")
    stack = RankStack(rank=3, pid=1, state="S", text=text, store=call)
    seen = StartLook.of(3, "n4", stack, rest_s=5.0)
    assert seen.meets
    assert not seen.imports
    assert seen.store == call
    assert not StartLook.of(
        3, "n4", RankStack(rank=3, pid=1, state="T", text=text), rest_s=5.0
    ).meets
