"""Bind every address of a node and become the head's agent: what the engine of an allocation does.

python network_head.py ADDRESS_FILE RUN_DIR LIFELINE_FD
"""

import os
import sys

from torchmuster.core.engines.local import agent_argv
from torchmuster.core.net.address import bind
from torchmuster.core.node.options import AgentOrder

address_file, run_dir, lifeline_fd = sys.argv[1:]
listening = bind("0.0.0.0", 0)
os.set_inheritable(listening.fileno(), True)
port = listening.getsockname()[1]
with open(f"{address_file}.new", "w") as file:
    file.write(str(port))
os.rename(f"{address_file}.new", address_file)
order = AgentOrder(
    run_dir=run_dir,
    place=0,
    head=(f"127.0.0.1:{port}",),
    listen_fd=listening.fileno(),
    lifeline_fd=int(lifeline_fd),
)
argv = agent_argv(order)
os.execv(argv[0], argv)
