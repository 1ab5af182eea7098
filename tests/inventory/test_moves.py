"""A host that moves to another rack keeps its text and its comments."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

from gpurun.inventory.edit import SetFields, apply, parse_settings

TEXT = """\
version: 1
defaults: {gpus: 4, generation: pascal}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks:
  # hall 1
  r1:
    hosts:
      n1: {port: 22,  # nat
           user: a}   # serial 2101
      # about n2
      n2:   # serial 2102
        gpus: 8   # eight
        # by hand
        port: 23
      "m[1-3]": {}   # three
  r2:
      defaults: {user: x}
      hosts:
          k1: {gpus: 2}  # k
  r3: {hosts: {z1: {}, z2: {}}}  # r3
# end
"""
MOVED = {  # hosts, settings → the lines that come
    ("n1", "rack=r2"): ("          n1: {port: 22,  # nat", "               user: a}   # serial 2101"),
    ("n2", "rack=r2"): (
        "          n2:   # serial 2102", "            gpus: 8   # eight", "            # by hand",
        "            port: 23",
    ),
    ("k1", "rack=r1"): ("      k1: {gpus: 2}  # k",),
    ("k1", "rack=r1 gpus=3"): ("      k1: {gpus: 3}  # k",),
    ("m1,m2,m3", "rack=r2"): ('          "m[1-3]": {}   # three',),
    ("m2", "rack=r2"): ('      "m[1,3]": {}   # three', '          "m2": {}'),  # the comment is of the others, too
    ("n1,n2", "rack=r3"): (
        "  # n1: nat", "  # n1: serial 2101", "  # n2: serial 2102", "  # n2: eight", "  # n2: by hand",
        "  r3: {hosts: {z1: {}, z2: {}, n1: {port: 22, user: a}, n2: {gpus: 8, port: 23}}}  # r3",
    ),
    ("k1", "rack=r9"): ("  # k1: k", "  r9: {hosts: {k1: {gpus: 2}}}"),
}  # fmt: skip


def test_a_moved_host_keeps_its_comments():
    for newline in ("\n", "\r\n"):
        text = TEXT.replace("\n", newline)
        for (hosts, settings), lines in MOVED.items():
            edit = SetFields(tuple(hosts.split(",")), parse_settings(settings.split()))
            after = apply(text.encode(), Path("/i.yaml"), edit).decode()
            come = [line[2:].rstrip() for line in ndiff(text.splitlines(), after.splitlines()) if line[0] == "+"]
            assert come == list(lines), (hosts, settings, after)
            assert after.count(newline) == after.count("\n"), (hosts, settings)
            comments = [part for line in text.splitlines() for part in line.split("#")[1:]]
            assert [part for part in comments if part.strip() not in after] == [], (hosts, settings)


def test_there_and_back_again_is_the_same_set_of_lines():
    for host in ("n1", "n2"):
        there = apply(TEXT.encode(), Path("/i.yaml"), SetFields((host,), parse_settings(["rack=r2"])))
        back = apply(there, Path("/i.yaml"), SetFields((host,), parse_settings(["rack=r1"])))
        assert sorted(back.decode().splitlines()) == sorted(TEXT.splitlines()), host


BRACES = """\
version: 1
defaults: {gpus: 4, generation: pascal}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks:
  r1: {hosts: {n1: {},  # serial 1
               # about n2
               n2: {port: 22,  # nat
                    user: a},   # serial 2
               "m[1-2]": {},  # two
               n3: {}}}  # end
  r2:
    hosts:
      k1: {}  # oldest
  r3: {hosts: {z1: {}}}
"""
OUT_OF_BRACES = {
    ("n1", "r2"): ("      n1: {}  # serial 1",),
    ("n2", "r2"): ("      # nat", "      # serial 2", "      n2: {port: 22, user: a}"),
    ("m1,m2", "r2"): ('      "m[1-2]": {}  # two',),
    ("n1,n2", "r3"): ("  # n1: serial 1", "  # n2: nat", "  # n2: serial 2",
                      "  r3: {hosts: {z1: {}, n1: {}, n2: {port: 22, user: a}}}"),
    ("n3", "r3"): ("  r3: {hosts: {z1: {}, n3: {}}}",),
    ("m2", "r2"): ('               "m1": {},  # two', '      "m2": {}'),  # the comment is of the other, too
}  # fmt: skip


def test_a_host_in_braces_over_several_lines_keeps_its_comments():
    """They were gone."""
    for newline in ("\n", "\r\n"):
        text = BRACES.replace("\n", newline)
        for (hosts, rack), lines in OUT_OF_BRACES.items():
            edit = SetFields(tuple(hosts.split(",")), parse_settings([f"rack={rack}"]))
            after = apply(text.encode(), Path("/i.yaml"), edit).decode()
            come = [line[2:].rstrip() for line in ndiff(text.splitlines(), after.splitlines()) if line[0] == "+"]
            assert [line for line in lines if line not in come] == [], (hosts, after)
            comments = [part.strip() for line in text.splitlines() for part in line.split("#")[1:]]
            assert [part for part in comments if after.count(part) != 1] == [], (hosts, after)
            assert after.count(newline) == after.count("\n"), hosts
