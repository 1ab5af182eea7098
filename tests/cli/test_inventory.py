"""``gpurun inventory``, as a person and as a script meet it."""

from __future__ import annotations

import io
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from json_shapes import printed_problems

from gpurun.cli.doctor import load_chosen
from gpurun.cli.main import main
from gpurun.cli.printing import wants_colour
from gpurun.inventory.read import load_inventory
from gpurun.state.hosts import Cordons

TEXT = """\
version: 1
defaults: {generation: pascal, gpus: 4}  # most of them
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1: {hosts: {"gpu-r1-[01-16]": {}}}
  r2: {hosts: {"gpu-r2-[01-04]": {generation: volta}}}  # old row
"""


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Gpurun = Callable[..., Said]


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "GPURUN_INVENTORY", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "a 'b' $c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = folder / "inventory.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def gpurun(inventory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gpurun:
    del inventory

    def run(*argv: str) -> Said:
        monkeypatch.setattr("sys.argv", ["gpurun", "inventory", *argv])
        with pytest.raises(SystemExit) as ended:
            main(["inventory", *argv])
        out, err = capfd.readouterr()
        assert printed_problems(["inventory", *argv], out) == []
        return Said(int(ended.value.code or 0), out, err)

    return run


def test_list_folds_and_filters(gpurun: Gpurun) -> None:
    said = gpurun("list")
    assert said.code == 0
    assert "gpu-r1-[01-16]" in said.out
    assert "20 hosts, 80 GPUs, 2 racks" in said.err
    assert gpurun("list", "gpu-r2-[03-09]").code == 2
    listed = gpurun("list", "@rack:r2&gpu-r2-[03-04]", "--json")
    assert [host["name"] for host in listed.json["hosts"]] == ["gpu-r2-03", "gpu-r2-04"]


def test_show(gpurun: Gpurun) -> None:
    assert "generation: volta" in gpurun("show", "gpu-r2-01").out
    shown = gpurun("show", "--json").json
    assert (shown["hosts"], shown["gpus"], shown["racks"]["r1"]) == (20, 80, "gpu-r1-[01-16]")


def test_validate(gpurun: Gpurun, inventory: Path) -> None:
    assert gpurun("validate").code == 0
    inventory.write_text(TEXT.replace("gpus: 4", "gpus: four").replace("volta", "-volta"))
    said = gpurun("validate", "inventory.yaml")
    assert said.code == 2
    assert said.out.splitlines() == [
        "inventory.yaml:2:38: gpus: 'four' is not a whole number (allowed: 0 to 128)",
        "inventory.yaml:6:47: generation: '-volta' is not a name (letters, digits, '.', '_', '-')",
    ]
    said = gpurun("validate", "--json")
    assert said.code == 2
    assert said.json["valid"] is False
    assert (said.json["problems"][0]["line"], said.json["problems"][0]["column"]) == (2, 38)
    assert gpurun("list").code == 2


def test_set_shows_the_difference_and_asks(gpurun: Gpurun, inventory: Path) -> None:
    said = gpurun("set", "gpu-r1-07", "gpus=8", "--dry-run")
    assert said.code == 0
    assert said.out.splitlines()[-1] == '   r2: {hosts: {"gpu-r2-[01-04]": {generation: volta}}}  # old row'
    assert '+  r1: {hosts: {"gpu-r1-[01-06,08-16]": {}, "gpu-r1-07": {gpus: 8}}}' in said.out
    assert gpurun("set", "gpu-r1-07", "gpus=8").code == 2  # nobody to ask
    assert inventory.read_text() == TEXT
    assert gpurun("set", "gpu-r1-07", "gpus=8", "--yes").code == 0
    assert load_inventory(inventory).by_name["gpu-r1-07"].gpus == 8
    again = gpurun("set", "gpu-r1-07", "gpus=8", "--yes")
    assert (again.code, again.err) == (0, "nothing to change\n")


def test_add_label_remove_diff_undo(gpurun: Gpurun, inventory: Path) -> None:
    assert gpurun("add", "new-[1-3]", "rack=r3", "gpus=2", "labels.a=b", "--yes").code == 0
    assert gpurun("label", "@rack:r3", "team=vision", "a-", "--yes").code == 0
    assert gpurun("remove", "new-2", "--yes").code == 0
    found = load_inventory(inventory)
    assert [host.name for host in found.hosts if host.rack == "r3"] == ["new-1", "new-3"]
    assert found.by_name["new-1"].labels == {"team": "vision"}
    changes = gpurun("diff", "--all", "--json").json["changes"]
    assert [change["number"] for change in changes] == [1, 2, 3]
    assert changes[2]["command"] == "gpurun inventory remove new-2 --yes"
    assert "-" in gpurun("diff", "1").out
    for _ in range(3):
        assert gpurun("undo", "--yes").code == 0
    assert inventory.read_text() == TEXT
    assert gpurun("undo", "--yes").code == 2
    assert gpurun("diff", "99").code == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["set", "gpu-r1-07", "gpus=four"], "'four' is not a whole number (allowed: 0 to 128)"),
        (["set", "gpu-r1-07", "gpus"], "'gpus' is not key=value"),
        (["set", "gpu-r1-07", "gpu=4"], "unknown key 'gpu'; did you mean 'gpus'?"),
        (["set", "gpu-r1-07", "zz=4"], "unknown key 'zz' (allowed: gpus, "),
        (["label", "gpu-r1-07", "a", "b"], "NAME=VALUE sets a label, NAME- removes it"),
        (["list", "@foo"], "@all, @cordoned, @draining, @lost, @out, @rack:NAME, @generation:NAME"),
        (["list", "@rack"], "@rack:NAME"),
        (["list", "@label:x"], "the inventory has no group @label:NAME"),
        (["set", "gpu-r1-07", "fabric=ib"], "there is no fabric 'ib'"),
        (["set", "gpu-r1-99", "gpus=4"], "has no host 'gpu-r1-99'"),
        (["set", "gpu-r1-07", "user=-oProxyCommand=x"], "is not a user name"),
        (["set", "gpu-r1-[01-02]", "address=10.0.0.1"], "gives 1 address for 2 hosts"),
        (["set", "gpu-r1-07", "labels.x=a\nb"], "is not a printable text"),
        (["set", "gpu-r1-07", "near_hca=[[[[[[1"], "is not a YAML value"),
        (["set", "gpu-r1-07", "near_hca=!!python/object:os.system 1"], "YAML"),
        (["add", "gpu-r1-07", "rack=r2"], "the inventory already has gpu-r1-07"),
        (["add", "new-1", "gpus=4"], "new hosts need a rack"),
        (["add", "-oProxyCommand=x", "rack=r1"], ""),
        (["add", "a b", "rack=r1"], "is not a host name"),
        (["add", "new-1", "rack=a/b"], "is not a name"),
        (["label", "gpu-r1-07", "-x=1"], ""),
        (["remove", "@rack:r9"], "there is no group @rack:r9\n  → the groups are: @rack:r1, @rack:r2"),
        (["list", "-i", "nope.yaml"], "no inventory at"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(gpurun: Gpurun, inventory: Path, argv: list[str], said: str) -> None:
    got = gpurun(*argv, *(["--yes"] if argv[0] != "list" else []))
    assert got.code == 2
    assert said in got.err
    assert "Traceback" not in got.err
    assert inventory.read_text() == TEXT
    assert sorted(p.name for p in inventory.parent.iterdir()) == ["inventory.yaml"]


def test_cordons_are_state_not_inventory(gpurun: Gpurun, inventory: Path, tmp_path: Path) -> None:
    assert gpurun("cordon", "gpu-r1-[01-02]", "--reason", "fan's 'broken'").code == 0
    assert gpurun("drain", "gpu-r1-03").code == 0
    assert inventory.read_text() == TEXT
    cordons = Cordons(tmp_path / "state").read()
    assert {name: cordon.state for name, cordon in cordons.items()} == {
        "gpu-r1-01": "cordoned", "gpu-r1-02": "cordoned", "gpu-r1-03": "draining",
    }  # fmt: skip
    listed = {host["name"]: host for host in gpurun("list", "--json").json["hosts"]}
    assert listed["gpu-r1-01"]["state"] == "cordoned"
    assert listed["gpu-r1-01"]["cordon"]["reason"] == "fan's 'broken'"
    assert "fan's 'broken'" in gpurun("list").out
    free = gpurun("list", "@generation:pascal&!@cordoned", "--json").json["hosts"]
    assert len(free) == 13
    assert gpurun("uncordon", "@cordoned", "--json").json["changed"] == ["gpu-r1-01", "gpu-r1-02", "gpu-r1-03"]
    assert Cordons(tmp_path / "state").read() == {}
    assert gpurun("cordon", "gpu-r1-01", "--reason", "a\x1b[2Jb").code == 2


def test_hosts_that_are_alike_are_shown_once(gpurun: Gpurun) -> None:
    out = gpurun("show", "@rack:r1").out
    assert gpurun("cordon", "gpu-r1-02", "--reason", "fan").code == 0
    apart = gpurun("show", "@rack:r1").out
    assert out.count("generation:") < apart.count("generation:")
    assert "gpu-r1-02:\n" in apart and "gpu-r1-[" in out


def test_a_damaged_cordon_file_is_named(gpurun: Gpurun, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cordons.json").write_text("{")
    said = gpurun("list")
    assert said.code == 5
    assert "cordons.json" in said.err


def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    script = tmp_path / "my editor.py"
    script.write_text(
        "#!/usr/bin/env python3\nimport sys, pathlib\np = pathlib.Path(sys.argv[-1])\n"
        f"p.write_text(p.read_text().replace({old!r}, {new!r}))\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("EDITOR", shlex.quote(str(script)))


def test_edit_starts_no_editor_of_its_own_without_a_terminal(gpurun: Gpurun, inventory: Path) -> None:
    said = gpurun("edit")
    assert said.code == 2 and "inventory edit needs a terminal" in said.err
    assert inventory.read_text() == TEXT


def test_edit(gpurun: Gpurun, inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor(tmp_path, monkeypatch, "# old row", "# older row")
    assert gpurun("edit").code == 0
    assert "# older row" in inventory.read_text()
    assert gpurun("edit").err == "nothing to change\n"


def test_edit_keeps_what_was_typed(
    gpurun: Gpurun, inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor(tmp_path, monkeypatch, "gpus: 4}", "gpus: four}  # typed with care,")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what was typed stays there
    said = gpurun("edit")
    assert said.code == 2
    assert "'four' is not a whole number (allowed: 0 to 128)" in said.err
    assert ":2:38:" in said.err
    assert inventory.read_text() == TEXT
    kept = shlex.split(said.err.rpartition("--resume ")[2])[0]
    assert "typed with care" in Path(kept).read_text()
    editor(tmp_path, monkeypatch, "four", "2")
    assert gpurun("edit", "--resume", kept).code == 0
    assert load_inventory(inventory).hosts[0].gpus == 2


@pytest.mark.parametrize(("command", "code"), [("false", 2), ("/no/such editor", 2)])
def test_an_editor_that_fails(gpurun: Gpurun, monkeypatch: pytest.MonkeyPatch, command: str, code: int) -> None:
    monkeypatch.setenv("EDITOR", command)
    assert gpurun("edit").code == code


def test_a_leased_host_is_refused_with_its_job(gpurun: Gpurun, inventory: Path, tmp_path: Path) -> None:
    from gpurun.jobs.spec import Grant
    from gpurun.leases.lease import Lease
    from gpurun.leases.occupancy import Occupancy
    from gpurun.leases.store import LeaseStore

    lease = Lease("j-0000abcd", 1, "me", 0, "pascal", ("r1",), (Grant("gpu-r1-07", (0,)),), 40000, 0.0, str(inventory))
    LeaseStore(tmp_path / "state").grant(lease, Occupancy()).close()
    for argv in (["remove", "gpu-r1-07"], ["set", "@rack:r1", "gpus=2"], ["set", "gpu-r1-07", "user=eve"]):
        said = gpurun(*argv, "--yes")
        assert said.code == 5
        assert "j-0000abcd" in said.err
        assert inventory.read_text() == TEXT
    assert gpurun("label", "gpu-r1-07", "a=b", "--yes").code == 0
    (tmp_path / "state" / "leases" / "j-0000abce.json").write_text("{")
    said = gpurun("set", "gpu-r1-01", "gpus=2", "--yes")
    assert said.code == 5
    assert "j-0000abce.json" in said.err


def test_schema_is_one_document(gpurun: Gpurun) -> None:
    assert gpurun("schema").json["properties"]["racks"]["additionalProperties"]["properties"]["hosts"]


def test_import_writes_a_valid_inventory_and_says_what_it_did(gpurun: Gpurun, inventory: Path) -> None:
    (inventory.parent / "hosts").write_text("[rack1]\nnode[01:20] gpus=4 gpu_type=P100 colour=red\n-x\n")
    assert gpurun("import", "hosts").code == 2  # there is one already
    assert "nosuch" in gpurun("import", "nosuch").err, "a source that is not there is said first"
    said = gpurun("import", "hosts", "-i", "new.yaml", "--fabric", "roce", "--interface", "ens1f0", "--hca", "mlx5_0")
    assert said.code == 0
    assert "20 hosts, 80 GPUs, 1 rack" in said.err
    assert "took: 20 hosts" in said.err
    assert "not mapped: hosts:2: variable colour" in said.err
    assert "not mapped: hosts:3: '-x' is not a host name" in said.err
    found = load_inventory(inventory.parent / "new.yaml")
    assert found.by_name["node07"].generation == "pascal"
    assert found.fabrics["roce"].hcas == ("mlx5_0",)
    assert gpurun("validate", "new.yaml").code == 0
    assert gpurun("import", "hosts", "--dry-run").out.startswith("# Imported from hosts")
    assert gpurun("import", "hosts", "--from", "excel", "-i", "x.yaml").code == 2
    assert gpurun("import", "nope", "-i", "x.yaml").code == 2
    assert gpurun("import", "hosts", "-i", "x.yaml", "--interface", "a b").code == 2
    assert not (inventory.parent / "x.yaml").exists()


def test_export(gpurun: Gpurun) -> None:
    assert gpurun("export", "hostfile", "gpu-r2-[01-02]").out == (
        "gpu-r2-01 slots=4 max_slots=4\ngpu-r2-02 slots=4 max_slots=4\n"
    )
    assert gpurun("export", "deepspeed", "gpu-r2-01").out == "gpu-r2-01 slots=4\n"
    document = gpurun("export", "json", "@rack:r2").json
    assert [host["name"] for host in document["hosts"]] == [f"gpu-r2-0{n}" for n in range(1, 5)]
    assert document["racks"] == {"r2": [f"gpu-r2-0{n}" for n in range(1, 5)]}
    assert "rack_r1:" in gpurun("export", "ansible").out
    assert (gpurun("export", "xml").code, "there is no format 'xml'" in gpurun("export", "xml").err) == (2, True)


def test_trust_of_a_host_that_is_not_there(gpurun: Gpurun, inventory: Path, tmp_path: Path) -> None:
    (inventory.parent / "ssh").write_text(f"UserKnownHostsFile {tmp_path}/known_hosts\nHost *\n  Port 1\n")
    inventory.write_text(TEXT.replace("version: 1", "version: 1\nssh_config: ssh") + "# end\n")
    assert gpurun("set", "gpu-r1-01", "address=127.0.0.1", "--yes").code == 0
    said = gpurun("trust", "gpu-r1-01", "--timeout", "1s")
    assert said.code == 4
    assert "gpu-r1-01: not trusted: no answer" in said.err
    document = gpurun("trust", "gpu-r1-01", "--timeout", "1s", "--json").json
    assert document["hosts"][0]["state"] == "unreachable"
    assert document["keys_written"] == 0
    assert not (tmp_path / "known_hosts").exists()


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def test_a_declined_change_exits_1_and_changes_nothing(
    gpurun: Gpurun, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert gpurun("set", "gpu-r1-01", "gpus=3").code == 1
    assert inventory.read_text() == TEXT
    monkeypatch.setattr("sys.stdin", Terminal(""))  # Ctrl-D
    assert gpurun("set", "gpu-r1-01", "gpus=3").code == 130
    assert inventory.read_text() == TEXT


def test_a_declined_prune_exits_1_like_every_declined_question(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gpurun.content import images

    placed = {"gpu-r1-01": [SimpleNamespace(id="sha256:1", used_by=(), needed=False, present=True)]}
    monkeypatch.setattr("gpurun.cli.content.fleet_of", lambda *_: nullcontext())
    monkeypatch.setattr("gpurun.cli.content._wanted", lambda _: [])
    monkeypatch.setattr("gpurun.cli.content._image_lines", lambda _: ["one image"])
    monkeypatch.setattr(images, "placed", lambda *_: SimpleNamespace(ok=placed, failed={}))
    monkeypatch.setattr(images, "prune", lambda *_: pytest.fail("pruned although a person said no"))
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(SystemExit) as ended:
        main(["images", "--prune", "-i", str(inventory)])
    assert ended.value.code == 1
    assert "Remove these images?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_diff_is_coloured_on_a_terminal_unless_the_environment_says_no(
    environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal()) is coloured
    assert not wants_colour(io.StringIO())


def test_doctor_bench_and_probe_know_the_groups_that_state_makes(gpurun: Gpurun, inventory: Path) -> None:
    assert gpurun("cordon", "gpu-r1-[02-03]").code == 0
    assert load_chosen(str(inventory), "@cordoned")[1] == ("gpu-r1-02", "gpu-r1-03")
