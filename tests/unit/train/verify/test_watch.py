"""What can't be verified is refused before the first step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchmuster.train.objects import Objects
from torchmuster.train.verify.watch import CantVerifyError, verify_steps, wanted_every

TWO_RANKS = SimpleNamespace(world_size=2)


def test_a_model_with_statistics_of_all_ranks_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    things = Objects({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    with pytest.raises(CantVerifyError, match="`model` again: it has SyncBatchNorm") as error:
        verify_steps(5, None, things, TWO_RANKS, None)
    assert error.value.muster_final


def test_the_script_has_the_last_word(monkeypatch):
    assert wanted_every(None) is None
    monkeypatch.setenv("TORCHMUSTER_VERIFY_EVERY", "7")
    assert wanted_every(None) == 7
    assert wanted_every(3) == 3


def test_a_replay_verifies_nothing(monkeypatch):
    monkeypatch.setattr(
        "torchmuster.core.model.contract.replay_order", lambda environment: object()
    )
    verify_steps(5, None, None, TWO_RANKS, None)
