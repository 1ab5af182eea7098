"""A rack of hosts behind one jump host, whose sshd has its defaults: each host is reached, by both transports."""

from __future__ import annotations

import pytest

from gpurun.remote import Fleet

pytestmark = pytest.mark.lab
HOSTS = 32


@pytest.mark.parametrize("ssh", ["paramiko", "system"])
def test_all_of_32_hosts_behind_one_jump_host_are_reached_though_its_sshd_drops_a_crowd(net, ssh):
    """A fleet opens 64 connections at once. sshd drops three of ten logins beyond ten (``MaxStartups``)."""
    net.ssh = ssh
    net.host("bastion", net.sshd("MaxStartups 10:30:100"))
    servers = [net.sshd() for _ in range(4)]
    targets = [net.host(f"gpu{at}", servers[at % len(servers)], "ProxyJump bastion") for at in range(HOSTS)]
    with Fleet.open(targets, timeout_s=60.0) as fleet:
        assert not fleet.failures, {host: error.message for host, error in fleet.failures.items()}
        assert len(fleet.agents) == HOSTS
