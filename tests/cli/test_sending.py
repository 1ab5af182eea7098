"""``status JOB`` says how far image and data are."""

from gpurun.cli.sending import sending


def test_the_last_word_of_each_host_counts_since_the_last_state():
    events = [
        {"kind": "stage", "data": "old", "host": "h0", "bytes": 1, "total": 1},
        {"kind": "state", "state": "PREPARING"},
        {"kind": "ship", "host": "h0", "state": "present"},
        {"kind": "stage", "data": "a\nb", "host": "h0", "bytes": 1 << 20, "total": 4 << 20, "eta_s": 3.0},
        {"kind": "stage", "data": "a\nb", "host": "h0", "bytes": 2 << 20, "total": 4 << 20, "eta_s": 61.5},
        {"kind": "stage", "data": "a\nb", "host": "h1", "bytes": None, "total": 4 << 20},
        {"kind": "note", "text": "x"},
    ]
    assert sending(events) == ["image: 0 B of 0 B on 1 hosts", "data a\nb: 2.0 MiB of 8.0 MiB on 2 hosts, 1m01s left"]
    assert sending([]) == []
