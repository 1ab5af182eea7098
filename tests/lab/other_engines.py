"""Other Docker engines on a lab's host, as people have them: one that remaps users, one that runs as a user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from faulting import wait_until

from gpurun.lab import Lab

SUBORDINATES = "echo train:200000:65536 | tee /etc/subuid > /etc/subgid"
COMMON = "--bridge=none --iptables=false --ip6tables=false --ip-forward=false --exec-opt=native.cgroupdriver=cgroupfs"
REMAPPED = f"""
{SUBORDINATES}
group=$(tr '\\0' '\\n' < /proc/$(cat /run/docker.pid)/cmdline | grep cgroup-parent)
exec dockerd --userns-remap=train --host=unix:///run/other.sock --group=docker "$group" {COMMON} \\
  --data-root=/var/lib/docker-other --exec-root=/run/docker-other --pidfile=/run/other.pid > /var/log/other.log 2>&1
"""
# As dockerd-rootless.sh does it (moby, contrib/), without systemd.
ROOTLESS = f"""
{SUBORDINATES}
export XDG_RUNTIME_DIR=/run/user/$(id -u train) HOME=/home/train
install -d -o train -g train -m 700 $XDG_RUNTIME_DIR
mkdir -p /dev/net && {{ test -e /dev/net/tun || mknod -m 666 /dev/net/tun c 10 200; }}
cd $HOME
exec setpriv --reuid=train --regid=train --init-groups rootlesskit --net=slirp4netns --mtu=65520 \\
  --slirp4netns-sandbox=false --disable-host-loopback --port-driver=builtin --copy-up=/etc --copy-up=/run \\
  --state-dir=$XDG_RUNTIME_DIR/rootlesskit sh -c 'rm -f /run/docker /run/containerd; exec "$0" "$@"' \\
  dockerd --host=unix://$XDG_RUNTIME_DIR/docker.sock {COMMON} --data-root=$HOME/docker \\
  --exec-root=$XDG_RUNTIME_DIR/exec --pidfile=$XDG_RUNTIME_DIR/docker.pid > $HOME/rootless.log 2>&1
"""
START = "cat > /run/other.sh; setsid sh /run/other.sh < /dev/null > /dev/null 2>&1 & echo $! > /run/other-engine.pid"
STOP = """
pid=$(cat /run/other-engine.pid); kill $pid; for _ in $(seq 100); do kill -0 $pid || break; sleep 0.1; done
rm -rf /var/lib/docker-other /home/train/docker /etc/subuid /etc/subgid /run/user/*
"""


@contextmanager
def other_engine(lab: Lab, host: str, script: str, socket: str) -> Iterator[str]:
    """``docker_host`` of an engine beside the host's own, while the block lasts."""
    lab.run(host, ["sh", "-c", START], stdin=script.encode())
    address = f"unix://{socket}"
    try:
        wait_until(lambda: lab.run(host, ["docker", "--host", address, "version"]).code == 0)
        yield address
    finally:
        lab.run(host, ["sh", "-c", STOP])
