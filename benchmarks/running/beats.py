"""What the training library's heartbeats cost a step."""

import time
from pathlib import Path

from torchmuster.core.model import contract
from torchmuster.core.model.progress import RankPhase
from torchmuster.train.heartbeat import open_heartbeat

BEATEN_STEPS = 2000


def heartbeats_us(rank: int, folder: Path) -> float:
    """Return the microseconds that the heartbeats of a step take, four phases and its end; their file is read by nobody."""
    heartbeat = open_heartbeat(
        {
            contract.SOCKET_VARIABLE: str(folder / "nobody.sock"),
            contract.ATTEMPT_VARIABLE: "0",
            "RANK": str(rank),
        }
    )
    began_s = time.perf_counter()
    for step in range(BEATEN_STEPS):
        for phase in (RankPhase.DATA, RankPhase.COMPUTE, RankPhase.FORWARD, RankPhase.COMPUTE):
            heartbeat.enter(phase)
        heartbeat.step(step)
    took_s = time.perf_counter() - began_s
    heartbeat.close()
    return 1e6 * took_s / BEATEN_STEPS
