"""Faults that are really made: `doctor` names each before the job, or `explain` after it, and nothing else first."""

import pytest

from lab.live import faults_launch, faults_network, faults_program, faults_system
from lab.live.case import FAULTS, Bench, chosen

pytestmark = pytest.mark.netns
MODULES = (faults_launch, faults_network, faults_program, faults_system)
SHARED = [fault for fault in FAULTS if fault.hosts is None]
OWN = [fault for fault in FAULTS if fault.hosts is not None]


def check(fault, told):
    assert told.first in fault.right, told.text
    assert told.first != "unknown"


@pytest.mark.parametrize("fault", chosen(SHARED))
def test_fault_is_named(fault, bench):
    check(fault, fault.make(bench))


@pytest.mark.parametrize("fault", chosen(OWN))
def test_fault_of_other_hosts_is_named(fault, make_lab, tmp_path):
    check(fault, fault.make(Bench(make_lab([*fault.hosts]), tmp_path)))


def test_there_are_enough_faults_and_some_of_them_in_every_run():
    assert len(FAULTS) >= 40
    assert sum(fault.quick for fault in FAULTS) >= 12
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
