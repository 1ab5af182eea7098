"""How many GPUs a job is worth, and whether a smaller gang ends sooner."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.cli.job_options import smaller_gang_of, smaller_in_words
from gpurun.doctor.findings import Link
from gpurun.errors import BadInput, StateError
from gpurun.inventory.read import parse_inventory
from gpurun.jobs.spec import Grant, HorovodKnobs, JobSpec, Roles
from gpurun.scaling.choice import (
    SmallerGang,
    exchange_of,
    in_words,
    least_efficiency,
    most_gpus,
    pair_figures,
    shape_of,
    sizes,
    smaller_gang,
)
from gpurun.scaling.model import (
    AHEAD,
    BYTE,
    COMPUTE,
    PARAMETERS,
    SPREAD,
    CannotPredict,
    LinkClass,
    LinkRates,
    Sample,
    Shape,
    Unknown,
    encode,
    fit,
    inverse_at,
    latency_at,
    step_seconds,
    traffic_of,
)
from gpurun.scheduler.model import Snapshot
from gpurun.studies.campaigns import campaign_samples

RATES = LinkRates(rack=1e9, racks=1e9)
TEXT = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-9]": {}}}}
"""
SPEC = JobSpec(name="mnist", image="i", gpus=8, command=("true",))


def samples(launcher=""):
    values = [1.0] * PARAMETERS
    values[COMPUTE], values[SPREAD], values[AHEAD], values[BYTE] = 0.1, 0.04, 1e6, 1e-11
    for link in LinkClass:
        values[latency_at(link)], values[inverse_at(link)] = 2e-3, 1.1
    for hosts in (1, 2, 4):
        shape = Shape((1,) * hosts, ("r1",) * hosts, rates=RATES)
        step_s = step_seconds(values, traffic_of(shape, 1e6, "ring", frozenset(LinkClass)))
        yield Sample(
            shape.ranks_per_host,
            shape.racks,
            32,
            1_000_000,
            step_s,
            32 * hosts / step_s,
            rates=RATES,
            launcher=launcher,
        )


@pytest.fixture(scope="module")
def model():
    return fit(samples())


@pytest.fixture
def inventory(tmp_path):
    return parse_inventory(TEXT.encode(), source=tmp_path / "inventory.yaml")


def chosen(model, inventory, least, spec=SPEC):
    return most_gpus(model, inventory, least, lambda gpus: replace(spec, gpus=gpus), sizes(inventory))


def test_the_most_gpus_above_an_efficiency(model, inventory):
    efficiencies = {}
    for gpus in range(1, 10):
        shape = Shape((1,) * gpus, ("r1",) * gpus)
        efficiencies[gpus] = model.predict(shape).efficiency.median
    choice = chosen(model, inventory, 0.8)
    assert 1 < choice.prediction.ranks == max(gpus for gpus, part in efficiencies.items() if part >= 0.8) < 9
    assert choice.larger.ranks == choice.prediction.ranks + 1
    assert f"{choice.prediction.ranks} GPUs" in in_words(choice, 0.8) and "below 80%" in in_words(choice, 0.8)
    assert chosen(model, inventory, 0.1).prediction.ranks == 9 and chosen(model, inventory, 0.1).larger is None
    with pytest.raises(BadInput, match="no number of GPUs reaches an efficiency of 100%"):
        most_gpus(model, inventory, 1.0, lambda gpus: replace(SPEC, gpus=gpus), range(2, 10))


def test_sizes_that_the_job_may_not_have_are_left_out(model, inventory):
    def spec_with(gpus):
        if gpus % 2:
            raise BadInput("even numbers only")
        return replace(SPEC, gpus=gpus)

    assert most_gpus(model, inventory, 0.1, spec_with, sizes(inventory)).prediction.ranks == 8
    with pytest.raises(BadInput, match="even numbers"):
        most_gpus(model, inventory, 0.1, spec_with, [1, 3])


def test_of_links_without_a_sample_nothing_is_said(model, tmp_path):
    text = TEXT.replace('"h[1-9]": {}', '"a[1-3]": {}, "b[1-3]": {}}}, r2: {hosts: {"c[1-6]": {}')
    two = parse_inventory(text.encode(), source=tmp_path / "i.yaml")
    choice = chosen(model, two, 0.1)
    assert choice.prediction.ranks == 6 and isinstance(choice.larger, CannotPredict)
    assert "more GPUs cannot be predicted" in in_words(choice, 0.1)


def test_what_the_bench_measured_between_racks_allows_a_prediction_there(tmp_path):
    racks = {"a": "r1", "b": "r1", "c": "r2"}
    links = [Link("a", "b", 5.0, 40.0), Link("a", "b", 0.9, 50.0), Link("b", "a", 1.1, 70.0), Link("a", "c", 0.2, 90.0),
             Link("c", "b", 0.0, 1.0), Link("x", "a", 100.0, 1.0), Link("a", "a", 9.0, 1.0)]  # fmt: skip
    near, far = pair_figures(links, racks)
    assert (near.link, near.bit_per_s, near.latency_s) == (LinkClass.RACK, pytest.approx(1e9), pytest.approx(60e-6))
    assert (far.link, far.bit_per_s, far.latency_s) == (LinkClass.RACKS, pytest.approx(0.2e9), pytest.approx(90e-6))
    apart = Shape((1, 1), ("r1", "r2"))
    with pytest.raises(CannotPredict):
        fit(samples(), [near]).predict(apart)
    assert fit(samples(), [near, far]).predict(apart).efficiency.median < 0.9
    assert pair_figures([], racks) == pair_figures(links, {}) == ()
    for gbit_per_s, latency_us in ((1e308, 1.0), (1e-300, 1.0), (float("nan"), 1.0), (1.0, float("inf"))):
        assert pair_figures([Link("a", "b", gbit_per_s, latency_us)], racks) == ()


def test_a_job_with_another_exchange_than_the_samples_is_refused(model, inventory):
    reduced_in_hosts = replace(SPEC, horovod=HorovodKnobs(hierarchical_allreduce=True))
    choice = chosen(model, inventory, 0.1, reduced_in_hosts)
    assert choice.prediction.ranks == 1 and choice.larger.reason is Unknown.EXCHANGE  # one rank exchanges nothing


def test_parameter_servers_count_where_gpurun_starts_them():
    spec = replace(SPEC, launcher="tensorflow", roles=Roles(ps=1))
    grants = (Grant("a", (0, 1, 2, 3)), Grant("b", (0,)))
    found = shape_of(spec, grants, {"a": "r1", "b": "r2"})
    assert (found.ranks_per_host, found.racks, found.servers_per_host) == ((4, 1), ("r1", "r2"), (0, 1))
    assert exchange_of(spec) == "servers"


def test_large_clusters_are_tried_at_few_sizes(tmp_path):
    text = TEXT.replace("gpus: 1", "gpus: 8").replace("h[1-9]", "h[0001-1008]")
    tried = sizes(parse_inventory(text.encode(), source=tmp_path / "i.yaml"))
    assert tried[:17] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80]
    assert len(tried) < 90 and tried[-1] > 7000 and tried == sorted(set(tried))


@pytest.mark.parametrize(("text", "least"), [("auto:80%", 0.8), ("auto:100%", 1.0), ("auto:1%", 0.01), ("8", None)])
def test_what_is_written_as_auto(text, least):
    assert least_efficiency(text) == least


HOSTILE = ["auto", "auto:", "auto:80", "auto:0%", "auto:101%", "auto:-5%", "auto:nan%", "auto:8 %", "auto:٨%",
           "automatic", "auto:80%\n", "auto:80%; rm -rf /"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_not_written_so_is_refused(text):
    with pytest.raises(BadInput, match="auto:80%"):
        least_efficiency(text)


def test_a_smaller_gang_ends_sooner_if_the_work_is_short(model):
    four, eight = (model.predict(Shape((1,) * n, ("r1",) * n)) for n in (4, 8))
    found = smaller_gang(four, eight, 3600.0, None)
    assert 0.5 < found.rate < 1 and not found.is_sooner
    work_s = found.sooner_below_s
    assert work_s / found.rate == pytest.approx(3600.0 + work_s)
    assert smaller_gang(four, eight, 3600.0, work_s - 1).is_sooner
    assert not smaller_gang(four, eight, 3600.0, work_s + 1).is_sooner
    assert smaller_gang(four, eight, None, 10.0) == SmallerGang(4, found.rate, False, None)
    assert smaller_gang(eight, four, 3600.0, None).is_sooner
    assert smaller_gang(four, eight, 0.0, None).sooner_below_s == 0.0
    assert "would end sooner if 8 GPUs need less than" in smaller_in_words(found, 8)


def test_why_says_so_from_the_campaign_of_the_jobs_name(tmp_path, inventory, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    waits = SimpleNamespace(changes=[SimpleNamespace(what="gpus", value="2")], expected_start_s=1900.0)
    snapshot = Snapshot(inventory, now_s=1000.0)

    def found(spec=SPEC):
        return smaller_gang_of(SimpleNamespace(spec=lambda: spec), snapshot, waits)

    assert found() is None
    store(tmp_path, "mnist", samples("horovod"))
    assert found().gpus == 2 and found().sooner_below_s > 0
    assert found(replace(SPEC, name="../mnist")) is found(replace(SPEC, launcher="torchrun")) is None
    waits.changes.clear()
    assert found() is None
    waits.changes.append(SimpleNamespace(what="gpus", value="2"))

    def damaged():
        raise StateError("is damaged")

    assert smaller_gang_of(SimpleNamespace(spec=damaged), snapshot, waits) is None


def store(home, name, samples):
    folder = home / "scaling" / name
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_bytes(b"".join(map(encode, samples)))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0b", "a\nb", "-rf", "é", "x" * 200])
def test_no_name_leads_out_of_the_state_directory(tmp_path, name):
    assert campaign_samples(tmp_path, name, "horovod") == ()


@pytest.mark.parametrize("what", ["campaign", "file"])
def test_samples_are_read_through_no_link(tmp_path, what):
    """A member of a shared state directory can put one there."""
    store(tmp_path / "elsewhere", "mnist", samples("horovod"))
    (tmp_path / "scaling").mkdir()
    campaign = tmp_path / "scaling" / "mnist"
    if what == "campaign":
        campaign.symlink_to(tmp_path / "elsewhere" / "scaling" / "mnist")
    else:
        campaign.mkdir()
        (campaign / "samples.jsonl").symlink_to(tmp_path / "elsewhere" / "scaling" / "mnist" / "samples.jsonl")
    with pytest.raises(StateError, match="link"):
        campaign_samples(tmp_path, "mnist", "horovod")


def test_submit_takes_the_size_and_says_why(tmp_path, monkeypatch, capsys):
    from gpurun.cli.main import main

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("GPURUN_HOME", str(home))
    (tmp_path / "i.yaml").write_text(TEXT)
    recipe = tmp_path / "mnist"
    recipe.mkdir()
    (recipe / "recipe.yaml").write_text("image: i:1\nlauncher: horovod\ncommand: [python3, train.py]\n")

    def submit(gpus, *flags):
        with pytest.raises(SystemExit) as ended:
            main(["submit", str(recipe), "-i", str(tmp_path / "i.yaml"), "-n", gpus, "--dry-run", "--json", *flags])
        return ended.value.code, *capsys.readouterr()

    code, _, err = submit("auto:80%")
    assert code == 2 and "no measured run of 'mnist' with launcher horovod" in err and "gpurun scale" in err
    store(home, "mnist", samples("horovod"))
    code, out, err = submit("auto:80%", "--name", "another")
    assert code == 0 and 1 < json.loads(out)["job"]["gpus"] < 9 and "--gpus auto:80%: " in err
    assert submit("auto:8")[0] == 2 and submit("auto:80%", "--launcher", "torchrun")[0] == 2
    (home / "scaling" / "mnist" / "samples.jsonl").write_text('{"step_s": NaN}\n')
    code, _, err = submit("auto:80%")
    assert code == 2 and "samples.jsonl:1" in err
