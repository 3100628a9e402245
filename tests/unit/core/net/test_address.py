import pytest

from torchmuster.core.net.address import interface_of


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_a_loopback_address_is_on_lo(address):
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_has_no_interface_here(address):
    assert interface_of(address) is None
