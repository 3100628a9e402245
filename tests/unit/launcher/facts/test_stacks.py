"""What a rank does is read from the files of its frames, not from a message."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.stacks import SITE, TORCH, stack
from kit.tables import rows
from torchmuster.launcher.facts.stacks import (
    RankActivity,
    is_importing,
    judge,
    main_first,
    main_frames,
    makes_store,
    user_frame,
    waits_for_loader,
)

STD = "/usr/lib/python3.11"
MAIN = ("/home/u/train.py", 41, "<module>")
OURS = ("/opt/torchmuster/core/node/spawner/mainmodule.py", 121, "_run_file")
C10D = f"{TORCH}/distributed/distributed_c10d.py"
FETCH = (f"{TORCH}/utils/data/_utils/fetch.py", 56, "fetch")
LOADER = (f"{TORCH}/utils/data/dataloader.py", 785, "_next_data")


def read_frames(text):
    """Return the frames of a row: files are below `SITE` or are `MAIN` where they do not begin with a slash."""
    return [
        MAIN if frame == "MAIN" else read_frame(*frame.split(" ")) for frame in text.split(" < ")
    ]


def read_frame(place, name):
    file, line = place.split(":")
    return os.path.join(SITE, file), int(line), name


@pytest.mark.parametrize(
    ("doing", "what", "frames"),
    rows(
        """
        WAITS      all_reduce                      torch/distributed/distributed_c10d.py:2810 all_reduce < torch/distributed/c10d_logger.py:83 wrapper < MAIN
        WAITS      barrier                         torch/distributed/distributed_c10d.py:5356 barrier < torch/distributed/c10d_logger.py:83 wrapper < MAIN
        WAITS      backward                        torch/autograd/graph.py:865 _engine_run_backward < torch/autograd/__init__.py:354 backward < torch/_tensor.py:625 backward < MAIN
        WAITS      the broadcast of DDP's buffers  torch/nn/parallel/distributed.py:2100 _sync_buffers < MAIN
        WAITS      torchmuster's lockstep          /usr/lib/python3.11/threading.py:331 wait < torchmuster/train/lockstep.py:80 _wait_for_all < MAIN
        WORKS      read()                          /home/u/data.py:88 read < torch/utils/data/_utils/fetch.py:56 fetch < torch/utils/data/dataloader.py:785 _next_data < MAIN
        WORKS      read()                          /usr/lib/python3.11/socket.py:706 readinto < /home/u/data.py:88 read < MAIN
        WORKS      its loader                      /usr/lib/python3.11/queue.py:180 get < torch/utils/data/dataloader.py:785 _next_data < MAIN
        COMPILES   <module>                        torch/_inductor/codecache.py:9 compile < MAIN
        COMPILES   -                               torch/_dynamo/symbolic_convert.py:9 run < MAIN
        WORKS      -                               /tmp/torchinductor_u/ab/cab.py:40 call < torch/_inductor/output_code.py:600 __call__ < torch/_dynamo/eval_frame.py:745 compile_wrapper < MAIN
        SAVES      -                               torch/serialization.py:800 _save < MAIN
        SAVES      -                               /usr/lib/python3.11/shutil.py:1 copy < /home/u/io.py:5 save_checkpoint < MAIN
        EVALUATES  evaluate()                      torch/nn/linear.py:1 forward < /home/u/t.py:7 evaluate < MAIN
        WAITS      all_gather                      torch/distributed/distributed_c10d.py:1 all_gather < /home/u/t.py:7 evaluate < MAIN
        DEBUGGED   -                               /usr/lib/python3.11/pdb.py:1 interaction < /home/u/t.py:7 f
        WORKS      -                               x/__init__.py:3 <module> < torch/_dynamo/symbolic_convert.py:55 <module> < MAIN
        """,
        3,
    ),
)
def test_frames_tell_what_a_rank_does(frames, doing, what):
    found = judge(stack(*read_frames(frames), OURS))
    assert found.doing is RankActivity[doing]
    assert what in ("-", found.what)


def test_the_scripts_innermost_frame_is_named():
    found = judge(stack((f"{STD}/ssl.py", 1, "read"), ("/home/u/data.py", 88, "read"), MAIN, OURS))
    assert found.place == "data.py:88"


def test_the_scripts_frame_is_named_of_a_rank_that_sleeps_in_the_kernel():
    found = judge(stack(("/home/u/data.py", 88, "read"), MAIN), state="D")
    assert (found.doing, found.what, found.place) == (
        RankActivity.UNINTERRUPTIBLE,
        "read()",
        "data.py:88",
    )


@pytest.mark.parametrize(
    ("state", "doing"),
    [("T", "STOPPED"), ("t", "DEBUGGED"), ("D", "UNINTERRUPTIBLE"), ("S", "UNKNOWN")],
)
def test_the_kernels_letter_counts_without_a_stack(state, doing):
    assert judge("", state=state).doing is RankActivity[doing]


def test_a_line_that_waits_for_the_gpu_is_a_wait_only_where_there_is_one():
    text = stack(MAIN, OURS)
    assert judge(text, source="total += loss.item()", uses_gpu=True).doing is RankActivity.WAITS
    assert judge(text, source="total += loss.item()").doing is RankActivity.WORKS
    assert judge(text, source="work.wait()").doing is RankActivity.WAITS
    assert judge(text, source="time.sleep(5)", uses_gpu=True).doing is RankActivity.WORKS


def test_a_loaders_process_that_stands_is_shown_instead_of_the_wait_for_it():
    worker = (f"{TORCH}/utils/data/_utils/worker.py", 374, "_worker_loop")
    text = stack((f"{STD}/queue.py", 180, "get"), LOADER, MAIN, OURS)
    idle = stack((f"{STD}/queue.py", 1, "get"), worker, MAIN, OURS)
    busy = stack(("/home/u/data.py", 88, "read"), FETCH, worker, MAIN, OURS)
    assert waits_for_loader(text)
    found = judge(text, children=[idle, busy])
    assert (found.what, found.place) == ("read()", "data.py:88")
    assert found.by == "in a process of its loader"
    assert not waits_for_loader(stack(("/home/u/data.py", 88, "read"), FETCH, LOADER, MAIN))


def test_the_main_thread_is_the_one_that_we_have_started_wherever_it_stands():
    other = stack((f"{STD}/threading.py", 1, "wait"), head="Current thread 0x01")
    main = stack(("/home/u/data.py", 88, "read"), MAIN, OURS, head="Thread 0x02")
    text = main_first(other + "\n" + main)
    assert text.startswith("Thread 0x02")
    assert user_frame(main_frames(other + "\n" + main)).name == "read"


def test_what_calls_a_function_is_ours_too():
    call = ("/opt/torchmuster/launcher/node/spawner/function.py", 51, "call")
    frames = main_frames(stack(("/home/u/train.py", 3, "train"), call, OURS))
    assert [frame.name for frame in frames] == ["train"]


def test_py_spy_is_read_as_well():
    text = (
        "Process 12: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 12 (idle): "MainThread"\n    read (/home/u/data.py:88)\n    <module> (/home/u/t.py:4)\n'
    )
    assert [frame.place for frame in main_frames(text)] == ["data.py:88", "t.py:4"]


@given(st.text(max_size=400), st.sampled_from("TtDSRZ"), st.text(max_size=50))
def test_no_text_is_too_odd_to_be_read(text, state, source):
    judge(text, state=state, source=source, children=[text], uses_gpu=True)
    main_first(text)
    waits_for_loader(text)


CREATES = (f"{TORCH}/distributed/rendezvous.py", 190, "_create_c10d_store")


@pytest.mark.parametrize(
    ("frames", "source", "makes"),
    [
        ([CREATES, (C10D, 1, "init_process_group"), MAIN], "", True),
        ([(C10D, 2169, "_new_process_group_helper"), MAIN], "", False),
        ([MAIN], 'store = dist.TCPStore("n1", 29501, 2, False)', True),
        ([MAIN], "data = load()", False),
        ([], "", False),
    ],
)
def test_who_makes_a_store_is_known(frames, source, makes):
    assert makes_store(stack(*frames), source) is makes


def test_a_store_that_the_script_opens_itself_is_a_wait():
    standing = judge(stack(MAIN), source='store = dist.TCPStore("n1", 29501, 2, False)')
    assert (standing.doing, standing.what) == (RankActivity.WAITS, "TCPStore")
    assert not standing.is_sure


def test_who_imports_a_library_is_known_and_a_module_of_the_script_is_none():
    frozen = ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
    library = (f"{SITE}/pandas/__init__.py", 3, "<module>")
    own = ("/home/u/data.py", 4, "<module>")
    assert is_importing(stack(library, frozen, MAIN))
    assert not is_importing(stack(own, frozen, MAIN))
    assert not is_importing(stack(library, MAIN))
