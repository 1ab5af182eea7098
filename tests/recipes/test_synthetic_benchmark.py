"""What the benchmark measures by, without a framework: sizes and pauses of its networks, spans, bytes, its choice."""

import importlib
import json
import sys

import pytest

from gpurun.jobs.recipe import build_spec as spec_of
from gpurun.jobs.recipe import read_recipe
from gpurun.launch.launchers import settled

OWN = ("benchmark", "choices", "flops", "measures", "models")


@pytest.fixture
def recipe(recipes, monkeypatch):
    monkeypatch.syspath_prepend(str(recipes / "synthetic-benchmark"))
    yield {name: importlib.import_module(name) for name in OWN}
    for name in OWN:
        sys.modules.pop(name)


def test_paced_networks_have_a_tenth_of_the_real_ones_parameters(recipe):
    paced = recipe["models"].PACED
    assert paced["resnet-like"].parameters == pytest.approx(25_557_032 / 10, rel=0.001)
    assert paced["vgg-like"].parameters == pytest.approx(138_357_544 / 10, rel=0.001)


def test_a_paced_step_computes_as_long_as_a_p100_but_for_the_slowdown(recipe):
    network = recipe["models"].PACED["vgg-like"]
    assert sum(map(sum, network.pauses(64, slowdown=1))) == pytest.approx(64 / 154)
    forward_s, backward_s = map(sum, zip(*network.pauses(64, slowdown=2.5), strict=True))
    assert backward_s == pytest.approx(2 * forward_s)
    assert network.layers[-3].parameters > 0.7 * network.parameters  # the first dense layer


def test_exchange_is_to_computing_as_on_a_p100_at_25_gbit(recipe):
    models = recipe["models"]
    for name, real_bytes in (("resnet-like", 102e6), ("vgg-like", 553e6)):
        network = models.PACED[name]
        lab = sum(map(sum, network.pauses(64))) / (network.parameters * 4 * 8 / 1e9)
        assert lab == pytest.approx(64 / network.rate / (real_bytes * 8 / 25e9), rel=0.01)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0), ([(1, 2)], 1), ([(1, 3), (2, 4)], 3), ([(5, 6), (1, 2)], 2), ([(0, 10), (2, 3)], 10), ([(2, 2)], 0)],
)
def test_time_in_which_anything_is_exchanged_counts_once(recipe, spans, seconds):
    assert recipe["measures"].busy_s(spans) == seconds


def test_spread_of_few_values(recipe):
    spread = recipe["measures"].spread
    assert spread([]) == (0.0, 0.0)
    assert spread([2.0]) == (2.0, 2.0)
    assert spread([float(n) for n in range(1, 12)]) == (2.0, 10.0)


def event(phase, at, who=1, name=""):
    return json.dumps({"ph": phase, "ts": at, "pid": who, "name": name}) + ","


def test_horovods_timeline_gives_exchange_without_negotiation(recipe):
    text = "\n".join([
        "[", event("B", 0, name="NEGOTIATE_ALLREDUCE"), event("X", 5), event("E", 10),
        event("B", 10, name="ALLREDUCE"), event("B", 11, name="MEMCPY_IN_FUSION_BUFFER"), event("E", 12),
        event("B", 20, name="GLOO_ALLREDUCE"), event("B", 25, who=2, name="NCCL_ALLREDUCE"), event("E", 2_000_020),
        event("E", 2_000_021), event("E", 3_000_025, who=2),
    ])  # fmt: skip
    assert recipe["measures"].timeline_s(text) == [(20e-6, 2.00002), (25e-6, 3.000025)]


def test_events_that_share_a_line_are_all_read(recipe):
    """Horovod 0.28 ends a line behind some events only."""
    text = "[\n" + event("B", 20, name="GLOO_ALLREDUCE") + event("E", 30) + '{"ph": "B", "ts": 40, "pi'
    assert recipe["measures"].timeline_s(text) == [(20e-6, 30e-6)]


@pytest.mark.parametrize("text", ["", "[", "{", "null,\n3,\n[]", '{"ph": "E", "pid": 1}', '{"ph":"B","ts":"x","pid":1}',
                                  '{"ph": "B", "ts": 1, "pid": 1, "name": null}'])  # fmt: skip
def test_a_damaged_timeline_gives_nothing(recipe, text):
    assert recipe["measures"].timeline_s(text) == []


def test_bytes_of_interfaces_and_hcas_without_lo(recipe, tmp_path):
    net, hcas = tmp_path / "net", tmp_path / "infiniband"
    for name, sent in (("lo", "7"), ("eth0", "100\n"), ("eth1", "20"), ("odd", "many")):
        (net / name / "statistics").mkdir(parents=True)
        (net / name / "statistics" / "tx_bytes").write_text(sent)
    counters = hcas / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("3")
    assert sorted(recipe["measures"].sent_counters(net, hcas).values()) == [0, 12, 20, 100]
    assert recipe["measures"].sent_counters(tmp_path / "none", tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("before", "after", "sent"),
    [
        ({"eth0": 100}, {"eth0": 130}, 30),
        ({"eth0": 100, "veth1": 10**9}, {"eth0": 130}, 30),  # another job's container ended
        ({"eth0": 100}, {"eth0": 130, "veth2": 10**9}, 30),
        ({"eth0": 100, "eth1": 5}, {"eth0": 130, "eth1": 0}, 30),  # its counter began anew
        ({}, {}, 0),
    ],
)
def test_interfaces_that_come_and_go_do_not_count(recipe, before, after, sent):
    """A rank once reported -1,506,580 bytes a step."""
    assert recipe["measures"].sent_bytes(before, after) == sent


def settled_from(recipe, *flags, card=None):
    return recipe["choices"].settle(
        recipe["benchmark"].parse_arguments(list(flags)), card and recipe["choices"].Card(*card)
    )


H100, V100, P100 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("Tesla V100-SXM2-16GB", (7, 0)), ("Tesla P100-PCIE-16GB", (6, 0))


def test_warm_up_is_run_and_not_measured(recipe, monkeypatch, capsys, tmp_path):
    measures, ran = recipe["measures"], []
    monkeypatch.setattr(measures, "gpurun", None)
    steps = measures.Steps(settled_from(recipe, "--steps", "3", "--warmup", "2", "--batch", "8"))
    steps.run(lambda: ran.append(1))
    assert len(ran) == 5 and len(steps.times_s) == 3 and steps.last == 5
    measures.write(tmp_path, "1", {"step_s": steps.step_s})
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "rank-1.json").read_text())
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1.json"]


def test_seconds_become_steps_that_all_ranks_agree_on(recipe, monkeypatch):
    measures, ran, asked = recipe["measures"], [], []
    clock = iter(range(1000))
    monkeypatch.setattr(measures.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(measures, "gpurun", None)
    steps = measures.Steps(settled_from(recipe, "--seconds", "3", "--warmup", "1"))
    steps.run(lambda: ran.append(1), lambda count: asked.append(count) or count + 2)
    assert asked == [3] and steps.count == 5 and len(steps.times_s) == 5  # a step takes one second
    assert len(ran) == steps.last == 1 + 1 + 5  # the step behind the agreement is not measured
    assert steps.rate == 32


@pytest.mark.parametrize(("seconds", "step_s", "count"), [(20, 0.1, 200), (1, 5, 2), (1, 0, 1_000_000)])
def test_at_least_two_steps_are_measured(recipe, seconds, step_s, count):
    assert recipe["choices"].steps_for(seconds, step_s) == count


@pytest.mark.parametrize(
    ("flags", "card", "chosen"),
    [
        ([], None, ("fp32", False, False, 32)),  # a CPU: as a plain program
        (["--precision", "bf16", "--compile"], None, ("bf16", True, False, 32)),
        (["--model", "resnet-50"], None, ("fp32", False, False, 64)),
        (["--model", "resnet-50"], H100, ("bf16", True, True, None)),
        (["--model", "resnet-50"], V100, ("fp16", True, True, None)),
        (["--model", "resnet-50"], P100, ("fp32", True, True, None)),
        (["--model", "resnet-50", "--batch", "9", "--no-compile"], H100, ("bf16", False, True, 9)),
        (["--model", "gpt2"], H100, ("bf16", True, False, None)),
        (["--model", "resnet-50", "--as-2017"], H100, ("fp32", False, False, 64)),
        (["--model", "resnet-50", "--as-2017", "--precision", "tf32"], H100, ("tf32", False, False, 64)),
        (["--model", "vgg-like"], H100, ("fp32", False, False, 64)),
    ],
)
def test_what_is_not_said_is_chosen_for_the_device(recipe, flags, card, chosen):
    found = settled_from(recipe, *flags, card=card)
    assert (found.precision, found.compile, found.channels_last, found.batch) == chosen


@pytest.mark.parametrize(
    ("flags", "card", "says"),
    [
        (["--precision", "tf32"], None, "only GPUs have TF32"),
        (["--precision", "bf16"], V100, "V100.*choose fp16"),
        (["--model", "vgg-like", "--precision", "bf16"], H100, "wait instead of computing"),
        (["--model", "resnet-like", "--compile"], None, "nothing to compile"),
    ],
)
def test_what_the_device_cannot_do_is_refused_with_what_to_do(recipe, flags, card, says):
    with pytest.raises(SystemExit, match=says):
        settled_from(recipe, *flags, card=card)


def test_an_image_without_a_compiler_trains_uncompiled_and_says_so(recipe, capsys):
    choices, parse = recipe["choices"], recipe["benchmark"].parse_arguments
    card, lacks = choices.Card(*H100), "C compiler and no Python.h (python3-dev)"
    assert choices.settle(parse(["--model", "gpt2"]), card, lacks).compile is False
    assert "has no C compiler" in capsys.readouterr().err
    assert choices.settle(parse([]), None, lacks).compile is False and not capsys.readouterr().err
    with pytest.raises(SystemExit, match="add it, or leave --compile out"):
        choices.settle(parse(["--compile"]), card, lacks)


@pytest.mark.parametrize(("most", "found"), [(256, 256), (255, 128), (40, 32), (0, 1)])
def test_a_batch_is_halved_until_it_fits(recipe, most, found):
    assert recipe["choices"].fitting(256, lambda batch: batch <= most) == found


def test_gpt2_has_the_published_sizes(recipe):
    """Radford et al. 2019, as counted today: 124, 355, 774 and 1558 million parameters."""
    of = recipe["models"].TRANSFORMERS
    found = [round(of[name].parameters(1024) / 1e6) for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")]
    assert found == [124, 355, 774, 1558]


def test_mfu_is_palms(recipe):
    """PaLM 540B: 238,300 tokens/s on 6,144 TPU v4 of 275 TFLOP/s; here one card, and a network known to PyTorch."""
    flops = recipe["flops"]
    assert flops.item_flop("gpt2", 1024) == 6 * 124_475_904 + 12 * 12 * 768 * 1024
    assert flops.item_flop("resnet-50", 0) == pytest.approx(24_535_105_536, rel=0.001)  # torch's FlopCounterMode
    half = 989.4e12 / 2 / flops.item_flop("resnet-50", 0)
    assert flops.figures("resnet-50", 0, "bf16", half, H100[0])["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize("card", ["", "cpu", "NVIDIA H100 NVL", "Tesla T40", "GPU '; rm\n", "AMD Instinct MI300X"])
def test_a_card_that_the_table_lacks_has_no_mfu(recipe, card):
    told = recipe["flops"].figures("vgg-16", 0, "bf16", 100.0, card)
    assert told["mfu"] is None and told["model_flop_per_s"] == pytest.approx(100 * 6 * 15.47e9)


def test_cards_go_by_their_whole_names(recipe):
    peak = recipe["flops"].peak_flop_per_s
    assert peak("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak("Tesla P100-PCIE-16GB", "fp32") == 9.3e12 and peak("Tesla P100-PCIE-16GB", "bf16") is None
    assert recipe["flops"].figures("tiny", 0, "fp32", 1.0, "NVIDIA H200") == {"model_flop_per_s": None, "mfu": None}


def test_a_transformer_counts_tokens(recipe):
    found = settled_from(recipe, "--model", "gpt2-tiny", "--sequence", "128", "--batch", "3")
    steps = recipe["measures"].Steps(found)
    assert (steps.items, steps.unit) == (3 * 128, "tokens")
    assert recipe["measures"].way_of_training(found) == {"precision_fp32": 1.0, "compiled": 0.0}


@pytest.mark.parametrize(
    ("environ", "way"),
    [
        ({}, "horovod"),
        ({"HOROVOD_RANK": "1"}, "horovod"),
        ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2"}, "torch"),
        ({"TF_CONFIG": '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}'}, "servers"),
    ],
)
def test_the_way_is_that_of_the_launcher(recipe, environ, way):
    assert recipe["benchmark"].chosen(environ) == way


def test_workers_without_servers_are_refused_with_the_recipe_to_use(recipe):
    with pytest.raises(SystemExit, match=r"ps\.yaml"):
        recipe["benchmark"].chosen({"TF_CONFIG": '{"cluster": {"worker": ["b:1"]}}'})


@pytest.mark.parametrize("flags", [["--steps", "1"], ["--warmup", "0"], ["--batch", "0"], ["--slowdown", "0"],
                                   ["--model", "alexnet"], ["--precision", "int8"], ["--sequence", "64"],
                                   ["--model", "gpt2", "--sequence", "0"], ["--seconds", "inf"], ["--seconds", "nan"],
                                   ["--batch", "-1"]])  # fmt: skip
def test_flags_that_cannot_be_measured_with_are_refused(recipe, flags, capsys):
    with pytest.raises(SystemExit) as ended:
        recipe["benchmark"].parse_arguments(flags)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_batch_has_the_usual_size_of_its_model(recipe):
    assert settled_from(recipe).batch == 32
    assert settled_from(recipe, "--model", "vgg-16").batch == 64
    assert settled_from(recipe, "--model", "vgg-16", "--batch", "2").batch == 2


@pytest.mark.parametrize("name", ["recipe", "ps", "torch"])
def test_every_variant_is_a_complete_job_of_the_same_script(recipes, build, name):
    spec, _ = settled(spec_of(read_recipe(recipes / "synthetic-benchmark" / f"{name}.yaml"), {}, {}), is_named=True)
    assert spec.command == ("python3", "benchmark.py", "--model", "resnet-like")
    assert spec.image in build.IMAGE.values()
    assert (spec.roles.ps if spec.roles else 0) == (4 if name == "ps" else 0)
