"""Commands of training on the hosts of a lab: a tiny script, several commands at once, their outputs."""

import subprocess
import sys
import time

from kit.command import SOURCE
from kit.waiting import wait_until

# All-reduce over gloo; what each rank got is one write, so that lines stay whole.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
if "python" in sys.argv:
    os.write(1, f"{sys.executable} on {os.uname().nodename}\\n".encode())
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
ones = torch.ones(1)
dist.all_reduce(ones)
place = f"rank {dist.get_rank()} on {os.uname().nodename} attempt {attempt} by {os.getenv('GLOO_SOCKET_IFNAME')}"
os.write(1, f"sum {int(ones.item())} {place}\\n".encode())
if "wait" in sys.argv or ("once" in sys.argv and attempt == "0"):
    import signal
    signal.pause()
dist.barrier()
if "write" in sys.argv:
    with open(f"made-by-{dist.get_rank()}", "w") as file:
        file.write("output\\n")
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Together:
    """The same command on several hosts at once, as a person with several terminals starts it.

    Words are formatted with `host`. Each writes into a file of its own: a worker that outlives its
    launcher then keeps no pipe open.
    """

    file_name = "said-{host}"

    def __init__(self, lab, hosts, words, folder, *, env=None):
        self.lab, self.hosts = lab, hosts
        self.files = {host: folder / self.file_name.format(host=host) for host in hosts}
        self.children = {host: self._start(host, words, env) for host in hosts}

    def _start(self, host, words, env):
        words = [word.format(host=host) for word in words]
        options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.files[host], "wb") as out:
            return self.lab.start(host, words, cwd=self.lab.shared, env=env, stdout=out, **options)

    def wait_for(self, text, limit_s):
        """Wait until one of them has printed this, or all have ended; then end them."""
        wait_until(
            lambda: (
                any(text in self.said(host) for host in self.hosts)
                or all(child.poll() is not None for child in self.children.values())
            ),
            f"{text!r} from {', '.join(self.hosts)}",
            limit_s,
        )
        return self.wait(0.0)

    def wait(self, limit_s):
        """Return the exit codes; None for those that ran longer, which are killed."""
        end_s = time.monotonic() + limit_s
        codes = {}
        for host, child in self.children.items():
            try:
                codes[host] = child.wait(max(0.01, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[host] = None
        for host in self.hosts:
            self.children[host].kill()
            self.children[host].wait()
            self.lab.kill(host)
        return codes

    def said(self, host):
        """Return what the command on a host has printed until now."""
        return self.files[host].read_text(errors="replace")


def muster_environment(lab, *, home="muster"):
    """Return what `muster` needs on a host that sees the source: runs are kept in the own HOME."""
    return {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(lab.home / home), "MUSTER_ON": "local"}
