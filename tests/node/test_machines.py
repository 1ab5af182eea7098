from __future__ import annotations

import pytest

from gpurun.node.job import gang

FILE = """\
127.0.0.1\tlocalhost
127.0.1.1 gpu01.site gpu01
::1 ip6-localhost
ff02::1 ip6-allnodes
# 10.9.0.9 gone
10.9.0.1   minio.site minio # the object store
fd00::7 v6
169.254.169.254 metadata
fe80::1%eth0 link
10.9.0.2 bad:name -flag ok_1 "quoted" ümlaut
10.9.0.300 nowhere
10.9.0.3
"""


def test_other_machines_are_those_with_an_address_that_leads_off_the_host(tmp_path):
    (tmp_path / "hosts").write_text(FILE)
    assert gang.known(str(tmp_path / "hosts")) == [
        ["minio.site", "10.9.0.1"], ["minio", "10.9.0.1"], ["v6", "fd00::7"], ["ok_1", "10.9.0.2"],
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00", b"10.0.0.1 a" * 1000, b"\n" * 100_000, b"#"])
def test_a_file_without_sense_names_few_or_none(tmp_path, text):
    (tmp_path / "hosts").write_bytes(text)
    assert len(gang.known(str(tmp_path / "hosts"))) <= gang.MOST


def test_a_long_file_is_cut_and_a_missing_one_empty(tmp_path):
    (tmp_path / "hosts").write_text("".join(f"10.1.{n // 256}.{n % 256} node{n}\n" for n in range(2000)))
    assert len(gang.known(str(tmp_path / "hosts"))) == 256
    assert gang.known(str(tmp_path / "none")) == []
