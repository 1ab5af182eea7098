"""Host keys before they are trusted, from real sshds."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest
import typer
from waiting import LIMIT_S

from gpurun.cli import inventory_hosts
from gpurun.errors import BadInput
from gpurun.remote.known_hosts import fingerprint
from gpurun.remote.route import resolve
from gpurun.remote.trust import Offer, accept, offers, rounds


def ask(net, *targets) -> tuple[Offer, ...]:
    return offers([resolve(target) for target in targets], ssh_config=str(net.ssh_config), timeout_s=LIMIT_S)


def blob(key: Path) -> bytes:
    return base64.b64decode(Path(f"{key}.pub").read_text().split()[1])


def test_new_keys_are_shown_as_ssh_keygen_shows_them_and_written_on_a_yes(net) -> None:
    server = net.sshd(keys=("ed25519", "ecdsa"))
    net.known_hosts.write_text("# ours\nother ssh-ed25519 AAAA")
    target = net.host("gpu-1", server)
    (offer,) = ask(net, target)
    assert (offer.host, offer.name, offer.state) == ("gpu-1", f"[127.0.0.1]:{server.port}", "new")
    printed = subprocess.run(
        ["ssh-keygen", "-lf", f"{server.host_keys[0]}.pub"], capture_output=True, text=True, check=True
    )
    assert {key.fingerprint for key in offer.keys} == {fingerprint(blob(key)) for key in server.host_keys}
    assert printed.stdout.split()[1] in {key.fingerprint for key in offer.keys}
    assert net.known_hosts.read_text() == "# ours\nother ssh-ed25519 AAAA"
    assert accept([offer]) == 2
    assert net.known_hosts.read_text().startswith("# ours\nother ssh-ed25519 AAAA\n[127.0.0.1]:")
    (again,) = ask(net, target)
    assert again.state == "known"
    assert accept([again]) == 0
    checked = subprocess.run(["ssh", "-F", net.ssh_config, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
                              "gpu-1", "echo yes"], capture_output=True, text=True, check=False)  # fmt: skip
    assert checked.stdout == "yes\n", checked.stderr


def test_a_changed_key_is_never_overwritten_without_replace(net) -> None:
    server = net.sshd()
    target = net.host("gpu-1", server)
    known = f"shared,[127.0.0.1]:{server.port} {net.public(net.new_key('old'))}  # row a\nother ssh-rsa AAAA\n"
    net.known_hosts.write_text(known)
    (offer,) = ask(net, target)
    assert offer.state == "changed"
    assert offer.keys[0].known == (fingerprint(blob(net.folder / "old")),)
    assert accept([offer]) == 0
    assert net.known_hosts.read_text() == known
    assert accept([offer], replace=True) == 1
    lines = net.known_hosts.read_text().splitlines()
    assert lines[0] == f"shared {net.public(net.folder / 'old')}  # row a"
    assert lines[2] == f"[127.0.0.1]:{server.port} {net.public(server.host_keys[0])}"
    assert ask(net, target)[0].state == "known"


def test_a_known_host_that_shows_only_other_types_has_changed(net) -> None:
    server = net.sshd(keys=("ecdsa",))
    target = net.host("gpu-1", server)
    old = net.public(net.new_key("old"))
    net.known_hosts.write_text(f"[127.0.0.1]:{server.port} {old}\n")
    (offer,) = ask(net, target)
    assert offer.state == "changed"
    assert accept([offer]) == 0
    accept([offer], replace=True)
    assert old not in net.known_hosts.read_text()


def test_a_hashed_name_is_found_and_replaced(net) -> None:
    server = net.sshd()
    target = net.host("gpu-1", server)
    net.known_hosts.write_text(f"[127.0.0.1]:{server.port} {net.public(net.new_key('old'))}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", net.known_hosts], check=True)
    (offer,) = ask(net, target)
    assert offer.state == "changed"
    accept([offer], replace=True)
    assert "|1|" not in net.known_hosts.read_text()
    assert ask(net, target)[0].state == "known"


def test_a_line_with_a_pattern_is_left_to_people(net) -> None:
    server = net.sshd()
    target = net.host("gpu-1", server)
    net.known_hosts.write_text(f"* {net.public(net.new_key('old'))}\n")
    (offer,) = ask(net, target)
    with pytest.raises(BadInput, match="by hand"):
        accept([offer], replace=True)


def test_a_revoked_key_is_refused(net) -> None:
    server = net.sshd()
    target = net.host("gpu-1", server)
    net.known_hosts.write_text(f"@revoked * {net.public(server.host_keys[0])}\n")
    (offer,) = ask(net, target)
    assert offer.state == "revoked"
    assert accept([offer], replace=True) == 0


def test_nobody_there_does_not_hide_the_others(net) -> None:
    up, down = net.sshd(), net.sshd(start=False)
    net.known_hosts.write_text("")
    there, gone = ask(net, net.host("gpu-1", up), net.host("gpu-2", down))
    assert (there.state, gone.state) == ("new", "unreachable")


def test_a_host_behind_a_jump_host(net) -> None:
    jump, inner = net.sshd(), net.sshd()
    net.host("jump", jump)
    target = net.host("inner", inner, "ProxyJump jump")
    known = net.known_hosts.read_text().splitlines(keepends=True)
    net.known_hosts.write_text(known[0])  # the jump host is trusted, the one behind it is not
    (offer,) = ask(net, target)
    assert offer.state == "new"
    assert [key.blob for key in offer.keys] == [blob(inner.host_keys[0])]
    assert accept([offer]) == 1
    net.known_hosts.write_text("")
    assert ask(net, target)[0].state == "unreachable"


@pytest.fixture
def trust(net, tmp_path, monkeypatch, capsys):
    """``gpurun inventory trust HOSTS`` with an inventory of one host, `inner`."""
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(
        f"version: 1\ndefaults: {{generation: pascal, gpus: 1}}\nssh_config: {net.ssh_config}\n"
        "fabrics: {tcp: {kind: tcp, interface: eth0}}\nracks: {r1: {hosts: {inner: {}}}}\n"
    )
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))

    def run(hosts: str, *, yes: bool = True) -> tuple[int, str, str]:
        code = 0
        try:
            inventory_hosts.trust(hosts, inventory=str(inventory), yes=yes, timeout_s=LIMIT_S)
        except typer.Exit as ended:
            code = ended.exit_code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_trust_asks_for_the_jump_host_first_and_then_for_the_host_behind_it(net, trust, monkeypatch) -> None:
    jump, inner = net.sshd(), net.sshd()
    net.host("jump", jump)
    net.host("inner", inner, "ProxyJump jump")
    net.known_hosts.write_text("")
    asked = []
    monkeypatch.setattr(inventory_hosts, "_ask", lambda wanted: asked.append([offer.host for offer in wanted]))
    code, out, err = trust("inner", yes=False)
    assert (code, asked) == (0, [["jump"], ["inner"]])
    assert [line.split()[0] for line in out.splitlines()] == ["jump", "inner"]
    assert "2 keys written" in err and len(net.known_hosts.read_text().splitlines()) == 2
    again = trust("inner")
    assert again == (0, f"{out.splitlines()[1].removesuffix(' new')} known\n", "known_hosts already has every key\n")


def test_trust_takes_the_name_of_a_jump_host_that_is_not_in_the_inventory(net, trust) -> None:
    jump, inner = net.sshd(), net.sshd()
    net.host("jump", jump)
    net.host("inner", inner, "ProxyJump jump")
    net.known_hosts.write_text("")
    assert trust("jump")[0] == 0
    assert net.known_hosts.read_text().startswith(f"[127.0.0.1]:{jump.port} ")
    assert trust("jump,inner")[0] == 0
    assert len(net.known_hosts.read_text().splitlines()) == 2
    with pytest.raises(BadInput, match="nosuch"):
        trust("nosuch")


def test_a_host_behind_a_jump_host_that_nobody_trusts_is_not_asked(net, trust) -> None:
    jump, inner = net.sshd(start=False), net.sshd()
    net.host("jump", jump)
    net.host("inner", inner, "ProxyJump jump")
    net.known_hosts.write_text("")
    code, _, err = trust("inner")
    assert code == 4
    assert "jump: not trusted: no answer" in err
    assert "inner: gpurun did not ask for the host key, because the jump host jump is not trusted" in err
    assert net.known_hosts.read_text() == ""


def test_a_person_who_declines_the_jump_host_is_asked_nothing_more(net, trust, monkeypatch) -> None:
    jump, inner = net.sshd(), net.sshd()
    net.host("jump", jump)
    net.host("inner", inner, "ProxyJump jump")
    net.known_hosts.write_text("")
    asked = []

    def decline(wanted):
        asked.append([offer.host for offer in wanted])
        raise typer.Exit(1)

    monkeypatch.setattr(inventory_hosts, "_ask", decline)
    assert trust("@all", yes=False)[0] == 1
    assert asked == [["jump"]] and net.known_hosts.read_text() == ""


def test_jump_hosts_are_asked_once_and_in_their_order(net) -> None:
    first, second, inner = net.sshd(start=False), net.sshd(start=False), net.sshd(start=False)
    net.host("first", first)
    net.host("second", second, "ProxyJump first")
    targets = [net.host(f"gpu-{at}", inner, "ProxyJump second") for at in (1, 2)]
    net.known_hosts.write_text("")
    routes = [resolve(target) for target in targets]
    assert [[route.name for route in some] for some in rounds(routes)] == [["first"], ["second"], ["gpu-1", "gpu-2"]]
    net.known_hosts.write_text(f"[127.0.0.1]:{first.port} {net.public(first.host_keys[0])}\n")
    assert [[route.name for route in some] for some in rounds(routes)] == [["second"], ["gpu-1", "gpu-2"]]
