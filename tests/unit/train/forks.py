"""A process that listens for requests to stop and forks, as a pool would: see test_preempt.py."""

import json
import os
import signal
import threading

import torch.distributed as dist

from torchmuster.train.preempt import StopWatch


def fork_and_end_child():
    """Return how a forked child ends that is sent SIGTERM."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"x")
        threading.Event().wait(20)
        os._exit(0)
    os.read(reader, 1)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    watch = StopWatch(
        dist.HashStore(), rank=0, world_size=1, deadline=lambda: None, say=lambda text: None
    )
    watch.begin(0)
    facts = {"child": fork_and_end_child()}
    threading.Event().wait(0.5)  # two looks of the thread
    facts["request_after_child"] = watch._request
    watch.close()
    watch = StopWatch(
        dist.HashStore(), rank=0, world_size=2, deadline=lambda: None, say=lambda text: None
    )
    watch.begin(0)
    os.kill(os.getpid(), signal.SIGTERM)
    facts["request_after_own"] = watch._request
    watch.close()
    after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    print(json.dumps({**facts, "handlers_given_back": before == after}))


if __name__ == "__main__":
    main()
