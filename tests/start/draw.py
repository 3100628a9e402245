"""Draw from every generator, in each rank of two attempts; the first is ended by a SIGKILL."""

import json
import multiprocessing
import os
import random
import secrets
import signal
import tempfile
import time
import uuid

import numpy as np
import torch

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
numbers = {
    "torch": torch.rand(1).item(),
    "torch's seed": torch.initial_seed(),
    "torch.randperm": torch.randperm(1000).tolist(),
    "numpy.random": np.random.rand(),
    "numpy.random.default_rng": np.random.default_rng().random(),
    "random": random.random(),
    "random.SystemRandom": random.SystemRandom().random(),
    "secrets": secrets.token_hex(),
    "uuid4": str(uuid.uuid4()),
    "uuid1": str(uuid.uuid1()),
    "temporary names": next(tempfile._get_candidate_names()),
    "multiprocessing's key": bytes(multiprocessing.current_process().authkey).hex(),
    "Python's hashes": hash("torch"),
    "an address": id(torch.nn.Module),
    "pid": os.getpid(),
    "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
}
with open(f"new-{attempt}-{rank}", "w") as file:
    json.dump(numbers, file)
os.rename(f"new-{attempt}-{rank}", f"numbers-{attempt}-{rank}")
while not all(os.path.exists(f"numbers-{attempt}-{other}") for other in range(4)):
    time.sleep(0.005)
if attempt == 0:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
