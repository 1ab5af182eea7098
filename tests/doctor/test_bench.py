"""Figures, the heat map, who is slow, and what was before."""

import json
import random
import xml.etree.ElementTree as ElementTree

import pytest

from gpurun.cli.doctor import spec_of
from gpurun.doctor import bench as bench_history
from gpurun.doctor.bench import short, svg
from gpurun.doctor.bench_job import bench
from gpurun.doctor.findings import BenchResult, Collective, Link, result_from_document, slow_links
from gpurun.drawing import viridis
from gpurun.errors import BadInput, GpurunError
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack

HOSTS = tuple(f"gpu-r{1 + n // 4}-{n % 4 + 1:02d}" for n in range(8))
RACKS = {host: host[4:6] for host in HOSTS}
RATES = dict.fromkeys(HOSTS, 10.0)


def run_of(rate, hosts=HOSTS):
    links = tuple(Link(a, b, rate(a, b), 30.0) for a in hosts for b in hosts if a != b)
    return BenchResult(hosts, links, (), {})


def honest(a, b):
    return 9.4 if RACKS[a] == RACKS[b] else 2.4


def test_bus_bandwidth_is_that_of_nccl_tests():
    # nccl-tests PERFORMANCE.md: algbw = S/t, busbw = algbw * 2*(n-1)/n
    one = Collective("mpi", 1_000_000_000, 1_000_000.0, 4)
    assert one.algorithm_gbyte_per_s == pytest.approx(1.0)
    assert one.bus_gbyte_per_s == pytest.approx(1.5)


def test_honest_links_are_not_accused_though_uplinks_are_slower():
    assert slow_links(run_of(honest), RACKS, RATES) == ()


def test_noise_is_not_accused():
    chance = random.Random(7)
    assert slow_links(run_of(lambda a, b: honest(a, b) * chance.uniform(0.8, 1.1)), RACKS, RATES) == ()


@pytest.mark.parametrize("bad", HOSTS)
def test_a_host_link_at_a_tenth_is_named_once(bad):
    result = run_of(lambda a, b: min(honest(a, b), 0.95) if bad in (a, b) else honest(a, b))
    (finding,) = slow_links(result, RACKS, RATES)
    assert finding.hosts == (bad,)
    assert "sends and receives only" in finding.evidence
    assert "nominal rate is 10" in finding.evidence


@pytest.mark.parametrize(("way", "words"), [(0, "host sends only"), (1, "host receives only")])
def test_one_direction(way, words):
    result = run_of(lambda a, b: 0.95 if (a, b)[way] == HOSTS[2] else honest(a, b))
    (finding,) = slow_links(result, RACKS, RATES)
    assert (finding.hosts, words in finding.evidence) == ((HOSTS[2],), True)


def test_two_bad_hosts():
    bad = {HOSTS[1], HOSTS[6]}
    result = run_of(lambda a, b: 0.9 if bad & {a, b} else honest(a, b))
    assert {finding.hosts for finding in slow_links(result, RACKS, RATES)} == {(host,) for host in bad}


def test_one_slow_path_names_the_path():
    result = run_of(lambda a, b: 1.0 if (a, b) == (HOSTS[0], HOSTS[1]) else honest(a, b))
    (finding,) = slow_links(result, RACKS, RATES)
    assert finding.links == ((HOSTS[0], HOSTS[1]),)


def test_two_hosts_are_held_against_their_own_rate():
    pair = HOSTS[:2]
    assert slow_links(run_of(lambda a, b: 4.0, pair), RACKS, RATES) == ()
    found = slow_links(run_of(lambda a, b: 0.95, pair), RACKS, RATES)
    assert {finding.hosts for finding in found} <= {pair, pair[::-1], pair[:1], pair[1:]}
    assert found


def test_one_stream_is_not_asked_to_fill_a_400_gbit_link():
    assert slow_links(run_of(lambda a, b: 25.0, HOSTS[:2]), RACKS, dict.fromkeys(HOSTS, 400.0)) == ()


def test_racks_that_are_not_known():
    assert slow_links(run_of(lambda a, b: 9.0), {}, {}) == ()


def document(**changes):
    pair = {"source": 0, "target": 2, "bytes": 125_000_000, "seconds": 1.0, "latency_us": 21.5}
    step = {"engine": "mpi", "bytes": 4, "time_us": 10.0, "iterations": 3}
    return {"version": 1, "world": 4, "mpi": "Open MPI", "pairs": [pair], "allreduce": [step], "skipped": {}} | changes


def test_ranks_become_hosts():
    result = result_from_document(document(), ["a", "b"], ["a", "a", "b", "b"])
    assert result.links == (Link("a", "b", 1.0, 21.5),)
    assert result.collectives[0].ranks == 4


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"pairs": None}, {"pairs": [{}]}, {"pairs": [{"source": 9, "target": 0, "bytes": 1, "seconds": 1,
     "latency_us": 1}]}, {"world": "x"}, {"allreduce": [{"engine": 1}]}, {"skipped": 3}],
)  # fmt: skip
def test_a_result_that_makes_no_sense_is_refused(changes):
    with pytest.raises(GpurunError):
        result_from_document(document(**changes), ["a", "b"], ["a", "a", "b", "b"])


# -- history -----------------------------------------------------------------------------------------------


def runs(*rates):
    return [bench_history.Run(float(at), run_of(rate).links) for at, rate in enumerate(rates)]


def shaped(a, b):
    return 0.95 if HOSTS[3] in (a, b) else honest(a, b)


def test_a_link_that_became_slower_is_named():
    (finding,) = bench_history.slower(runs(honest, honest, honest, honest, shaped), HOSTS)
    assert (finding.check, finding.hosts) == ("link-history", (HOSTS[3],))


def test_one_earlier_run_is_enough_for_much_slower():
    assert bench_history.slower(runs(honest, shaped), HOSTS)
    assert bench_history.slower(runs(honest, lambda a, b: honest(a, b) * 0.6), HOSTS) == ()
    assert bench_history.slower(runs(*[honest] * 4, lambda a, b: honest(a, b) * 0.6), HOSTS)


def test_no_history_and_a_mended_link_are_no_finding():
    assert bench_history.slower([], HOSTS) == ()
    assert bench_history.slower(runs(honest), HOSTS) == ()
    assert bench_history.slower(runs(honest, honest, shaped, honest), HOSTS) == ()


def test_a_link_is_not_judged_by_old_figures():
    told = runs(honest, honest, honest, honest, shaped)
    last_s = told[-1].time_s
    assert bench_history.slower(told, HOSTS, since_s=last_s)
    assert bench_history.slower(told, HOSTS, since_s=last_s + 1) == ()


def test_hosts_that_are_not_asked_about_stay_out():
    assert bench_history.slower(runs(honest, honest, honest, honest, shaped), HOSTS[4:]) == ()


def test_history_is_kept_and_damage_passed_over(tmp_path):
    for run in runs(honest, shaped):
        bench_history.BenchHistory(tmp_path).append(run)
    with bench_history.BenchHistory(tmp_path).file().plain.open("a") as stream:
        stream.write('{"time_s": 1}\nnot json\n{"time_s": 9, "links": [["a\'b", "c", 1, "x"]]}\n')
    found = bench_history.BenchHistory(tmp_path).read()
    assert [run.time_s for run in found] == [0.0, 1.0]
    assert found[1].links[0].gbit_per_s == pytest.approx(honest(*HOSTS[:2]))
    assert bench_history.BenchHistory(tmp_path / "none").read() == ()


def test_history_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_history, "KEPT_RUNS", 3)
    for at in range(5):
        bench_history.BenchHistory(tmp_path).append(bench_history.Run(float(at), ()))
    assert [run.time_s for run in bench_history.BenchHistory(tmp_path).read()] == [2.0, 3.0, 4.0]


# -- the picture -------------------------------------------------------------------------------------------


def test_the_picture_is_well_formed_and_shows_every_link():
    hosts = ("<h&1>", 'h"2', "h3")
    picture = ElementTree.fromstring(svg(run_of(lambda a, b: 1.234, hosts), "a <title> & more"))
    tips = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == 6
    assert '<h&1> → h"2: 1.234 Gbit/s' in tips


def test_a_picture_of_nothing():
    ElementTree.fromstring(svg(BenchResult((), (), (), {}), ""))


@pytest.mark.parametrize(("figure", "text"), [(0.0, "0.00"), (9.994, "9.99"), (24.66, "24.7"), (186.7, "187")])
def test_short_figures(figure, text):
    assert short(figure) == text


def test_colours_stay_in_range():
    for part in (-1.0, 0.0, 0.5, 1.0, 7.0):
        assert all(0 <= shade <= 255 for shade in viridis(part))


# -- the job -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("at_once", [False, True])
def test_every_pair_once_and_nobody_in_two_pairs_of_a_round(count, at_once):
    plan = bench.rounds(list(range(0, 4 * count, 4)), at_once)
    pairs = [pair for one in plan for pair in one]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for one in plan:
        busy = [rank for pair in one for rank in pair]
        assert len(busy) == len(set(busy))


def test_only_links_below_their_like_are_measured_again():
    ranks = dict(enumerate(HOSTS))
    group_of = {rank: RACKS[host] for rank, host in ranks.items()}
    figures = [
        {"source": a, "target": b, "bytes": shaped(ranks[a], ranks[b]), "seconds": 1.0}
        for a in ranks for b in ranks if a != b
    ]  # fmt: skip
    again = bench.suspects(figures, group_of)
    assert again
    assert all(3 in pair for pair in again)
    assert bench.suspects([], group_of) == []


def inventory(**generations):
    hosts = tuple(Host(name, "r1", generation, 4, "tcp") for name, generation in generations.items())
    return Inventory(hosts, (Rack("r1", tuple(generations)),), {"tcp": Fabric("tcp", FabricKind.TCP, "eth0")})


OPTIONS = {"image": "i", "gpus_per_host": 2, "seconds": 0.5, "sizes": "8,16", "engine": "auto"}


def test_the_job():
    spec = spec_of(inventory(a="pascal", b="pascal"), ["a", "b"], **OPTIONS)
    assert (spec.gpus, spec.controller, spec.constraints.gpus_per_host) == (4, "mpi", 2)
    assert spec.command[spec.command.index("--leaders") + 1] == "0,2"
    assert json.loads(spec.command[spec.command.index("--racks") + 1]) == {"a": "r1", "b": "r1"}
    assert "--at-once" not in spec.command
    many = {f"h{n}": "pascal" for n in range(13)}
    assert "--at-once" in spec_of(inventory(**many), list(many), **OPTIONS).command


@pytest.mark.parametrize(
    ("generations", "changes"),
    [({"a": "pascal"}, {}), ({"a": "pascal", "b": "volta"}, {}), ({"a": "pascal", "b": "pascal"}, {"engine": "x; y"}),
     ({"a": "pascal", "b": "pascal"}, {"sizes": "8,$(id)"}), ({"a": "pascal", "b": "pascal"}, {"sizes": "0"})],
)  # fmt: skip
def test_bad_input(generations, changes):
    with pytest.raises(BadInput):
        spec_of(inventory(**generations), list(generations), **(OPTIONS | changes))
