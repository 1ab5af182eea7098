"""``status JOB`` says how far image, data and workdir are."""

from gpurun.cli.content import say_failures
from gpurun.cli.shares import sending
from gpurun.errors import BadInput, HostUnreachable
from gpurun.jobs.events import Sent


def test_what_hosts_have_is_added_up():
    sent = [
        Sent("ship", "h0", state="present"),
        Sent("stage", "h0", "a\nb", bytes=2 << 20, total=4 << 20, eta_s=61.5),
        Sent("stage", "h1", "a\nb", total=4 << 20),
        Sent("note", "h1"),
        Sent("workdir", "h1", bytes=1 << 30, total=3 << 29),
    ]
    assert sending(sent) == [
        "image: 0 B of 0 B on 1 host", "data a\nb: 2.0 MiB of 8.0 MiB on 2 hosts, 1m01s left",
        "workdir: 1.0 GiB of 1.5 GiB on 1 host",
    ]  # fmt: skip
    assert sending([]) == []


def test_hosts_that_failed_in_the_same_way_share_a_line(capsys):
    typo = {f"h{n}": BadInput("line 3: Bad\x1b[2J option", host=f"h{n}", hint="repair it") for n in (1, 2, 3)}
    say_failures({**typo, "h4": HostUnreachable("no route to host", host="h4")})
    said = capsys.readouterr().err.splitlines()
    assert said == ["gpurun: h[1-3]: line 3: Bad\\x1b[2J option", "  → repair it", "gpurun: h4: no route to host"]
    say_failures({name: HostUnreachable(f"no name {name}", hint=f"try: ssh {name}") for name in ("h1", "h2")})
    assert capsys.readouterr().err.splitlines() == ["gpurun: h[1-2]: no name h[1-2]", "  → try: ssh h[1-2]"]
