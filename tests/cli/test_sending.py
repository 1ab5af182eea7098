"""``status JOB`` says how far image and data are."""

from gpurun.cli.sending import sending
from gpurun.jobs.sending import Sent


def test_what_hosts_have_is_added_up():
    sent = [
        Sent("ship", "h0", state="present"),
        Sent("stage", "h0", "a\nb", bytes=2 << 20, total=4 << 20, eta_s=61.5),
        Sent("stage", "h1", "a\nb", total=4 << 20),
        Sent("note", "h1"),
    ]
    assert sending(sent) == ["image: 0 B of 0 B on 1 hosts", "data a\nb: 2.0 MiB of 8.0 MiB on 2 hosts, 1m01s left"]
    assert sending([]) == []
