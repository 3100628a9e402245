"""The interfaces of the machine that runs the test."""

import ipaddress
import socket

import pytest

from torchmuster.core.net.address import own_addresses
from torchmuster.launcher.net.interfaces import is_own_address, link_names, own_interfaces


def test_every_address_that_others_may_reach_is_listed_without_loopback():
    ipv4 = [i.address for i in own_interfaces() if ":" not in i.address]

    assert sorted(ipv4) == sorted(own_addresses())
    assert "lo" not in {i.name for i in own_interfaces()}


def test_each_has_its_name_and_a_prefix_of_its_family():
    for interface in own_interfaces():
        assert interface.name in link_names()
        address = ipaddress.ip_address(interface.address)
        assert 0 < interface.prefix_bits <= address.max_prefixlen
        assert not address.is_loopback


def test_all_links_are_named_also_those_without_an_address():
    assert set(link_names()) == {name for _, name in socket.if_nameindex()}


def test_an_address_that_we_could_bind_is_ours():
    assert is_own_address("127.0.0.1")


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b", "x" * 64 + ".example"])
def test_an_address_that_we_can_t_bind_is_not_ours(host):
    assert not is_own_address(host)
