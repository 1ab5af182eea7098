"""What people type in front of a program: wrappers and launchers, with flags that gpurun takes, keeps or refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_gangs import GANG, SPEC
from public_lines import MORE
from typed_lines import LINES

from gpurun.errors import BadInput
from gpurun.jobs.spec import Retry
from gpurun.launch.launchers import NAMES, launcher_of, settled
from gpurun.launch.launchers.direct import PYTHON, with_local_rank
from gpurun.launch.launchers.table import LAUNCHERS, SRUN

WITH_LOCAL_RANK = shlex.join(with_local_rank(PYTHON))


def read(gpus, line, launcher=None, **changes):
    command = tuple(shlex.split(line)) if isinstance(line, str) else tuple(line)
    spec = replace(SPEC, gpus=gpus, command=command, launcher=launcher or SPEC.launcher, **changes)
    return settled(spec, is_named=launcher is not None)


def lost(words, spec, said):
    """The words that are neither in the job nor in what the person is told."""
    has = {*spec.command, *spec.env, *spec.env.values(), *spec.launcher_flags}
    has |= {f"{name}={value}" for name, value in spec.env.items()}
    return {word for word in words if word not in has and not any(shlex.quote(word) in text for text in said)} - READ


NAMED = {word for each in LAUNCHERS for name in (*each.programs, *each.modules) for word in name.split()}
READ = NAMED | {
    "-m", "--module", "--no-python", "--run-path", "--no_python", "--no_local_rank", "--use_env", "-c", "--role", "-x",
    "-genv", "--env", "--mpi", "--gloo", "bash", "command", "/bin/bash", "env", "-S", "-vS", "--export", "srun",
}  # fmt: skip
"""They are in the command, the variables or the controller that the person sees."""


def typed(command):
    """A command without the flags that gpurun has set for a launcher that runs itself on each host."""
    at = next((at for at, word in enumerate(command) if word.startswith("exec ") and "$N" in word), None)
    if at is None:
        return command
    words = shlex.split(command[at].removeprefix("exec ").replace('"$@"', "").partition(" $(")[0])
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    return (*command[: at - 2], *words[:first], *command[at + 2 :])


def becomes_what(gpus, line):
    """What becomes of a line, after a look for words that have gone without a word."""
    try:
        spec, said = read(gpus, line)
    except BadInput as refused:
        assert refused.hint
        return f"refused: {refused.message}"
    once = ", once on each host" if spec.one_per_host else ""
    words = [part for word in lost(shlex.split(line), spec, said) for part in shlex.split(word)]
    assert {word.rpartition("/")[2] for word in lost(words, spec, said)} <= READ
    became = f"{spec.launcher}{once}: {shlex.join(typed(spec.command))}".replace(WITH_LOCAL_RANK, "LOCAL_RANK")
    return re.sub(r"sh -c 'version=.*' torch.distributed.launch", "LOCAL-RANK", became)


@pytest.mark.parametrize(("gpus", "line", "becomes"), LINES, ids=[line for _, line, _ in LINES])
def test_a_line_that_people_type_runs_as_it_is_meant_or_is_refused(gpus, line, becomes):
    became = becomes_what(gpus, line)
    assert became.startswith(becomes) if becomes.startswith("refused: ") else became == becomes


def test_more_lines_run_as_they_are_meant_or_are_refused():
    for gpus, line, becomes in MORE:
        became = becomes_what(gpus, line)
        assert became.startswith(becomes) if becomes.startswith("refused: ") else became == becomes, line


def test_there_are_many_lines():
    assert len(LINES) >= 60
    assert len({line for _, line, _ in LINES}) == len(LINES)


DOCUMENTED = {
    "torchrun": (  # torchrun --help of PyTorch 2.13
        "--nnodes= --nproc-per-node= --nproc_per_node= --rdzv-backend= --rdzv_backend= --rdzv-endpoint= "
        "--rdzv-id= --rdzv-conf= --standalone --max-restarts= --max_restarts= --monitor-interval= --start-method= "
        "--event-log-handler= --role= -m --module --no-python --run-path --log-dir= -r= --redirects= -t= --tee= "
        "--local-ranks-filter= --node-rank= --master-addr= --master-port= --local-addr= --logs-specs= "
        "--numa-binding= --signals-to-handle= --virtual-local-rank --duplicate-stdout-filters= "
        "--duplicate-stderr-filters= --shutdown-timeout= "
    ),
    "deepspeed": (  # deepspeed --help of DeepSpeed 0.19
        "-H= --hostfile= -i= --include= -e= --exclude= --num_nodes= --min_elastic_nodes= --max_elastic_nodes= "
        "--num_gpus= --num_accelerators= --master_port= --master_addr= --node_rank= --launcher= --launcher_args= "
        "--module --no_python --no_local_rank --no_ssh_check --force_multi --save_pid --enable_each_rank_log= "
        "--autotuning= --elastic_training --bind_cores_to_rank --bind_core_list= --ssh_port= --no_ssh --venv_script= "
    ),
    "mpirun": (  # schizo_ompi.c of Open MPI 4.1 and 5.0
        "-np= --np= -n= -c= -H= --host= -host= --hostfile= -hostfile= --machinefile= --default-hostfile= -N= "
        "-npernode= --pernode --npersocket= --map-by= -map-by= --rank-by= --bind-to= -bind-to= --report-bindings "
        "-report-bindings --bycore --bynode --byslot --oversubscribe -oversubscribe --nolocal --nooversubscribe "
        "--use-hwthread-cpus --cpus-per-proc= --cpu-set= --rankfile= -x= --mca== -mca== --gmca== --am= --tune= "
        "--tag-output -tag-output --timestamp-output --output-filename= --xterm= --stdin= --wdir= -wdir= -wd= "
        "--prefix= --preload-files= --preload-binary --tmpdir= --allow-run-as-root --display-map "
        "--display-allocation --timeout= --app= -q -v --enable-recovery --disable-recovery "
        "--runtime-options= --stream-buffering= --gomca== --amca= --path= --ppr= --show-progress --forward-signals= "
        "--merge-stderr-to-stdout --report-pid= --server-wait-time= --debug "
    ),
    "horovodrun": (  # horovodrun --help of Horovod 0.28.1
        "-v --version -np= --num-proc= -cb --check-build --disable-cache --start-timeout= --network-interfaces= "
        "--output-filename= --verbose --config-file= -p= --ssh-port= -i= --ssh-identity-file= "
        "--fusion-threshold-mb= --cycle-time-ms= --cache-capacity= --hierarchical-allreduce "
        "--no-hierarchical-allreduce --autotune --no-autotune --autotune-log-file= --autotune-warmup-samples= "
        "--autotune-steps-per-sample= --autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise= "
        "--min-np= --max-np= --slots-per-host= "
        "--blacklist-cooldown-range== --log-hide-timestamp --elastic-timeout= --reset-limit= --timeline-filename= "
        "--timeline-mark-cycles --no-stall-check --stall-check-warning-time-seconds= "
        "--stall-check-shutdown-time-seconds= --mpi-threads-disable --mpi-args= --tcp --binding-args= "
        "--num-nccl-streams= --thread-affinity= --log-level= --log-with-timestamp -H= --hosts= -hostfile= "
        "--hostfile= --host-discovery-script= --gloo --mpi --jsrun "
    ),
    "composer": "-n= --nproc= --stdout= --stderr= -v --verbose -m -c --world_size= --base_rank= --node_rank= "
                "--master_addr= --master_port= --version",
    "colossalai run": "-H= --hostfile= -host= --host= --include= --exclude= --num_nodes= --nproc_per_node= "
                      "--master_addr= --master_port= --extra_launch_args= --ssh-port= -m",
    "srun": "-N= --nodes= -n= --ntasks= --ntasks-per-node= -p= --gpus-per-node= --gres= -t= --mem= -c= --exclusive "
            "--label --cpu-bind= --mpi= --export= --container-image= -o= -D= --nodelist= --multi-prog --unknown-to-all",
}  # fmt: skip
"""What each launcher's own help names; an ``=`` for each value."""
NUMBERS = ("np", "nnodes", "nproc", "num", "min", "max", "nodes", "ntasks", "-n", "-c", "-N", "world")


def values_of(flag):
    if any(word in flag for word in NUMBERS):
        return st.integers(1, 99).map(str)
    return st.from_regex(r"[a-z][a-z0-9_./:,^@ ='\"$é\n]{0,9}", fullmatch=True)


@st.composite
def lines(draw):
    name = draw(st.sampled_from(sorted(DOCUMENTED)))
    words = name.split()
    for text in draw(st.lists(st.sampled_from(DOCUMENTED[name].split()), max_size=6)):
        flag, count = text.rstrip("="), text.count("=")
        if flag == "--role" and any(word.startswith(flag) for word in words):
            continue  # a second one takes the first one's place, as torchrun itself does
        values = [draw(values_of(flag)) for _ in range(count)]
        joined = count == 1 and flag.startswith("--") and name != "mpirun" and draw(st.booleans())
        words += [f"{flag}={values[0]}"] if joined else [flag, *values]
    inner = ["torchrun"] if name == "srun" else []
    return name, [*words, *inner, "train.py", "--lr", "0.1"]


@given(lines(), st.integers(1, 16), st.sampled_from([None, *NAMES]))
def test_no_documented_flag_of_a_launcher_vanishes(line, gpus, launcher):
    _, words = line
    try:
        spec, said = read(gpus, words, launcher)
    except BadInput as refused:
        assert refused.hint
        return
    typed = [part for word in words for part in ([word] if "--role=" not in word else word.split("=", 1))]
    assert not lost(typed, spec, said)


@given(st.sampled_from([each for each in LAUNCHERS if each.launcher]), st.data())
def test_gpurun_knows_what_it_does_with_each_flag_of_its_tables(typed, data):
    name, flag = data.draw(st.sampled_from(sorted(typed.flags.items())))
    if flag.does in ("taken", "refused"):
        assert flag.why, name
    if flag.does == "kept":
        assert launcher_of(replace(SPEC, launcher=typed.launcher)).argv is not None, "nobody gets it"


def test_a_word_that_is_no_flag_of_a_launcher_is_refused_by_name():
    for each in (*LAUNCHERS, SRUN):
        if each.flags:
            program = each.programs[0] if each.programs else f"python -m {each.modules[0]}"
            with pytest.raises(BadInput, match="--frobnicate"):
                read(4, f"{program} --frobnicate=1 train.py")


ARGV = "mpirun --allow-run-as-root -np 3 -H h2:2,h3:1"
MASTER = "-x MASTER_ADDR=10.0.0.2 -x MASTER_PORT=23022 -x GLOO_SOCKET_IFNAME=eth0"
MAPS, TCP = "--map-by slot --rank-by slot --bind-to none", "-mca pml ob1 -mca btl ^openib"


@pytest.mark.parametrize(
    ("flags", "launch"),
    [
        ("--tag-output", f"{MAPS} {TCP} --tag-output"),
        ("-bind-to core", f"--map-by slot --rank-by slot {TCP} -bind-to core"),
        ("-map-by slot:PE=4", f"--rank-by slot --bind-to none {TCP} -map-by slot:PE=4"),
        ("--mca btl tcp,self", f"{MAPS} -mca pml ob1 --mca btl tcp,self"),
        ("--mca oob_tcp_if_include ib0", f"{MAPS} {TCP}"),
        ("-wdir /w -x A", f"{MAPS} {TCP} -wdir /w -x A"),
        ("-x MASTER_ADDR -x MASTER_PORT=1", f"{MAPS} {TCP}"),
    ],
)
def test_what_mpirun_gets_has_each_setting_once(flags, launch):
    spec, _ = read(3, f"mpirun -np 3 {flags} python3 train.py")
    argv = " ".join(launcher_of(spec).argv(spec, GANG))
    argv = argv.replace(" -mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0", "")
    assert argv == f"{ARGV} {launch} -x PATH -x PYTHONPATH {MASTER} /gpurun/bin/rank"


def test_horovodrun_gets_the_flags_that_were_typed_behind_those_of_gpurun():
    spec, _ = read(3, "horovodrun -np 3 --start-timeout 600 --no-stall-check python3 train.py")
    argv = launcher_of(spec).argv(spec, GANG)
    assert argv[-4:] == ("--start-timeout", "600", "--no-stall-check", "/gpurun/bin/rank")
    assert read(3, "horovodrun --mpi python3 x.py")[0].controller == "mpi"


@pytest.mark.parametrize(
    ("gpus", "line", "least"),
    [
        (12, "torchrun --nnodes=1:3 --nproc_per_node=4 train.py", 4),
        (8, "torchrun --nnodes=1:3 --nproc_per_node=4 train.py", 4),
        (12, "torchrun --nnodes=1:3 train.py", 4),
        (4, "torchrun --nnodes=1:3 --nproc_per_node=4 train.py", None),
        (8, "torchrun --nnodes=2:2 --nproc_per_node=4 train.py", None),
        (8, "torchrun --nproc_per_node=2 train.py", None),
        (8, "torchrun --nnodes=3 train.py", None),
        (8, "horovodrun -np 4 --min-np 2 --max-np 8 python3 train.py", 2),
    ],
)
def test_a_range_of_hosts_makes_the_gang_elastic(gpus, line, least):
    spec, said = read(gpus, line)
    assert spec.min_gpus == least
    assert any(f"elastic: {least} to {gpus} GPUs" in text for text in said) == (least is not None)


@pytest.mark.parametrize(
    ("gpus", "line", "words"),
    [
        (16, "torchrun --nnodes=1:3 --nproc_per_node=4 x.py", "asks for 4 to 12 processes, but the job has 16 GPUs"),
        (2, "torchrun --nnodes=4 --nproc-per-node=8 x.py", "asks for 32 processes, but the job has 2 GPUs"),
        (8, "mpirun -np 16 ./a", "asks for 16 processes"),
        (8, "deepspeed --num_gpus 8 --num_nodes 2 x.py", "asks for 16 processes"),
        (10, "torchrun --nnodes=1:3 x.py", "but gives no number of processes for each host"),
        (4, "torchrun --nnodes=two x.py", "must be a number of hosts or a range"),
        (4, "torchrun --nproc-per-node=⁴ x.py", "must be a number, not"),
        (4, "torchrun --nnodes=0:0 --nproc-per-node=4 x.py", "asks for 0 processes"),
        (1, "accelerate launch --num_processes 4 x.py", "--num_processes 4 asks for several processes"),
        (4, "mpirun -x GPURUN_RANK=1 ./a", "gpurun itself sets GPURUN_RANK"),
        (4, "OMPI_COMM_WORLD_RANK=1 ./a", "horovod itself sets OMPI_COMM_WORLD_RANK"),
        (4, "MASTER_ADDR=n1 RANK=0 python3 x.py", "all 4 ranks would have the same value of RANK"),
        (
            4,
            "MASTER_ADDR=n1 python3 x.py",
            "env sets MASTER_ADDR, but the right value depends on the hosts that gpurun chooses",
        ),
        (4, "A=1", "has no program after A=1"),
        (4, "env -u A torchrun", "has no program after torchrun"),
        (4, "torchrun --standalone", "has no program after torchrun"),
        (4, "torchrun --nnodes", "--nnodes needs a value"),
        (4, "mpirun -mca btl", "-mca needs a value"),
    ],
)
def test_a_line_that_contradicts_the_job_or_itself_is_refused(gpus, line, words):
    with pytest.raises(BadInput, match=words):
        read(gpus, line)


@pytest.mark.parametrize(
    "line",
    ["mpirun -np 4 -npernode 1 torchrun --nproc_per_node 2 x.py", "torchrun --no-python accelerate launch x.py",
     "horovodrun -np 4 bash -c 'cd /w; deepspeed x.py'", "deepspeed --no_python mpirun -np 4 ./a",
     "srun -N2 mpirun -np 4 uv run torchrun x.py"],
)  # fmt: skip
def test_a_launcher_that_starts_a_launcher_is_refused_with_the_inner_line(line):
    with pytest.raises(BadInput, match=r"starts a rank for each GPU, so .* would run 4 times") as refused:
        read(4, line)
    assert "write only the inner command: " in refused.value.hint
    assert read(4, "torchrun train.py --run torchrun x")[0].command[2:] == ("train.py", "--run", "torchrun", "x")


def test_a_flag_that_may_have_a_value_takes_no_word_for_it():
    for flag in ("--kill-on-bad-exit", "--kill-on-bad-exit=1", "--exclusive=user", "--exclusive"):
        spec, said = read(4, f"srun {flag} torchrun x.py")
        assert spec.launcher == "torchrun" and any(flag in text for text in said)


def test_a_least_number_that_is_said_twice_must_be_the_same():
    line = "torchrun --nnodes=1:2 --nproc-per-node=4 x.py"
    assert read(8, line, min_gpus=4)[0].min_gpus == 4
    with pytest.raises(BadInput, match="min_gpus is 6"):
        read(8, line, min_gpus=6)


@pytest.mark.parametrize(
    ("line", "command", "env"),
    [
        ("A=1 B='x y' torchrun x.py", "python3 -u x.py", {"A": "1", "B": "x y"}),
        ("env -u A B=1 torchrun x.py", "env -u A python3 -u x.py", {"B": "1"}),
        ("env -C /w -- torchrun x.py", "env -C /w python3 -u x.py", {}),
        ("MASTER_ADDR=n1 PET_NNODES=3 CUDA_VISIBLE_DEVICES=0 torchrun x.py", "python3 -u x.py", {}),
        ("CUDA_VISIBLE_DEVICES= torchrun x.py", "python3 -u x.py", {"CUDA_VISIBLE_DEVICES": ""}),
        ("bash -ec 'A=1 exec torchrun x.py'", "bash -ec 'exec \"$@\"' bash python3 -u x.py", {"A": "1"}),
        ("sh -c \"torchrun x.py 'a b'\"", "python3 -u x.py 'a b'", {}),
        ("uv run --with=numpy -m torch.distributed.run x.py", "uv run --with=numpy python -u x.py", {}),
        ("python3 -X dev -u -m torch.distributed.run -m pkg", "python3 -u -m pkg", {}),
        ("srun --export=ALL,A=1 torchrun x.py", "python3 -u x.py", {"A": "1"}),
        ("nice -n5 stdbuf -oL torchrun x.py", "nice -n5 stdbuf -oL python3 -u x.py", {}),
    ],
)
def test_wrappers_are_looked_through_and_what_they_do_stays(line, command, env):
    spec, said = read(4, line)
    assert (spec.launcher, shlex.join(spec.command), dict(spec.env)) == ("torchrun", command, env)
    assert all(name in "\n".join(said) for name in ("MASTER_ADDR", "PET_NNODES") if name in line)
    assert "-X dev" not in line or any("-X dev" in text for text in said)


@pytest.mark.parametrize(
    "line",
    ["true", "env", "env A=1", "A=1 env", "bash -c", "sh -c 'cd /w; python3 x.py'", "sh x.sh torch", "uv run x.py",
     "python3 -m torch.utils.collect_env", "python3 train.py torchrun x", "echo '", "sh -c \"echo 'torchrun\"",
     "composer install", "llamafactory-cli chat x.yaml", "accelerate config", "./train.sh --launcher torchrun x"],
)  # fmt: skip
def test_a_command_without_a_launcher_is_not_touched(line):
    words = line.split() if line == "echo '" else shlex.split(line)
    spec, said = read(4, words)
    assert spec.command == tuple(word for word in words if word != "A=1" or words[0] != "A=1")
    assert bool(said) == (words[0] == "A=1")


@pytest.mark.parametrize(
    "line",
    ["nsys profile torchrun x.py", "strace -f python3 -m torch.distributed.run x.py", "env -i torchrun x.py",
     "timeout --frob 3 torchrun x.py", "env -iS 'torchrun x.py'", "nsys profile sh -c 'torchrun x.py'",
     "singularity exec --nv img.sif torchrun x.py"],
)  # fmt: skip
def test_no_gang_starts_copies_of_a_launcher_unless_somebody_says_so(line):
    with pytest.raises(BadInput, match=r"ranks would start |starts a container"):
        read(4, line)
    with pytest.raises(BadInput, match=r"ranks would start |starts a container"):
        read(4, line, "torchrun")
    assert read(1, line)[0].launcher == "tasks"
    assert "itself" in read(1, line)[1][0]
    spec, said = read(4, line, "tasks")
    assert (spec.launcher, spec.command) == ("tasks", tuple(shlex.split(line)))
    assert "each of 4 ranks starts" in said[0]


@pytest.mark.parametrize(
    "line",
    ["sh -c 'cd /w; torchrun x.py'", "sh -c 'if true; then A=1 torchrun x.py; fi'",
     "bash -c 'a && (mpirun -n 2 ./x)'",
     "bash -c 'x=$(torchrun x.py)'", "sh -c 'A=1 bash -c \"cd /w; uv run torchrun x.py\"'",
     "bash -c 'a\ntorchrun x.py'", "bash -c 'torchrun x.py --n $N'", "A=1 bash -c 'torchrun $1 x.py' x --standalone"],
)  # fmt: skip
def test_a_shells_text_that_starts_a_launcher_runs_once_on_each_host(line):
    spec, said = read(4, line)
    assert (spec.launcher, spec.one_per_host) == ("tasks", True)
    assert spec.command == tuple(shlex.split(line.removeprefix("A=1 ")))
    assert "so gpurun runs the command once on each host" in said[0]
    assert spec.constraints.gpus_per_host == (4 if "mpirun" in line or "--standalone" in line else None)
    with pytest.raises(BadInput, match=r"ranks would start torchrun|ranks would start mpirun"):
        read(4, line, "torchrun")
    assert not read(4, line, "tasks")[0].one_per_host
    assert not read(1, line)[0].one_per_host


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("sbatch -N 2 --gres=gpu:a100:8 train.sbatch --lr 1", "gpurun submit -n 16 … -- bash train.sbatch --lr 1"),
        (
            "A=1 sbatch --nodes=2 --gpus-per-node=8 --wrap='srun torchrun x.py'",
            "gpurun submit -n 16 … -- A=1 bash -c 'srun torchrun x.py'",
        ),
        ("salloc -G 4 -- srun ./a", "gpurun submit -n 4 … -- srun ./a"),
        ("ray job submit --address x -- python3 train.py", "gpurun submit -n 2 … -- python3 train.py"),
    ],
)
def test_another_queue_is_refused_with_the_line_for_this_one(line, proposed):
    with pytest.raises(BadInput, match="asks another queue for machines") as refused:
        read(2, line)
    assert proposed in refused.value.hint


PIECES = (
    "bash", "-c", "env", "-u", "A=1", "torchrun", "python3", "-m", "srun", "uv", "run", "'", "$(", "--", "-", "",
    "mpirun", "torch.distributed.run", "-np", ":", "=", "é\n", "(" * 50,
)  # fmt: skip


@pytest.mark.parametrize(("version", "flag"), [("1.13.1", "--local_rank"), ("2.11.0a0+git1", "--local-rank")])
@pytest.mark.parametrize("module", [(), ("-m",)])
def test_a_script_of_torch_distributed_launch_has_its_local_rank_as_its_pytorch_spells_it(
    tmp_path, version, flag, module
):
    (tmp_path / "torch.dist-info").mkdir()
    (tmp_path / "torch.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (tmp_path / "train it.py").write_text("import sys; print(sys.argv[1:])")
    script = "train it" if module else str(tmp_path / "train it.py")
    spec, _ = read(2, [sys.executable, "-m", "torch.distributed.launch", *module, script, "a b", "--x"])
    environ = {**os.environ, "LOCAL_RANK": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(spec.command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"['{flag}=1', 'a b', '--x']\n"


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))
def test_whatever_is_typed_is_read_or_refused(words):
    try:
        spec, said = read(4, words)
    except BadInput:
        return
    assert spec.command
    assert all(isinstance(text, str) for text in said)


def test_a_very_long_command_is_read_quickly():
    words = ["nsys", *["python3", "torchrun-not"] * 3000, "x"]
    assert read(4, words)[0].command == tuple(words)
    assert read(4, ["env"] * 500)[0].command == ("env",) * 500


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("B=1 mpirun -x A=1 -npernode 1 torchrun t.py", "B=1 A=1 torchrun t.py"),
        ("A=1 torchrun -m torch.distributed.run t.py", "A=1 python3 -u -m torch.distributed.run t.py"),
    ],
)
def test_a_proposed_line_has_the_variables_and_the_wrappers_of_the_typed_one_and_runs(line, proposed):
    with pytest.raises(BadInput) as refused:
        read(4, line)
    assert proposed in refused.value.hint
    assert read(4, proposed)[0].env.keys() & {"PYTHONPATH", "A"}


def test_shells_among_the_words_of_a_program_are_read_once_each():
    command = ("x", *["bash"] * 3000, "-c", "torchrun t.py")
    with pytest.raises(BadInput, match="would start torchrun"):
        read(2, command)


RESTARTS = ("torchrun --nproc-per-node=2 --max-restarts=3 t.py", "python3 -m torch.distributed.launch --use_env "
            "--nproc_per_node=2 --max_restarts 3 t.py", "mpirun -np 2 --max-restarts 3 ./t")  # fmt: skip


@pytest.mark.parametrize("line", RESTARTS)
def test_typed_restarts_become_retries_of_the_job(line):
    spec, said = read(2, line)
    assert spec.retry == Retry(3)
    words = "up to 3 retries after a failure or a hang, only with progress"
    assert said[-1] == f"  gpurun starts the whole job again after its program fails: {words}"
    assert any("left out: --max" in text and "--retry N" in text for text in said)
    assert read(2, line, retry=Retry(3, ("hang",), wait_s=5.0))[0].retry == Retry(3, ("hang",), wait_s=5.0)
    with pytest.raises(BadInput, match=r"the command asks for 3 restarts, but `retry` asks for 2") as refused:
        read(2, line, retry=Retry(2))
    assert "--retry 3" in refused.value.hint
    with pytest.raises(BadInput, match=r"at most 1000"):
        read(2, line.replace("3", "1001", 1) if "=3" in line else line.replace(" 3 ", " 1001 "))
    with pytest.raises(BadInput, match=r"--max-restarts must be a number"):
        read(2, line.replace("restarts=3", "restarts=x").replace("restarts 3", "restarts x"))


@pytest.mark.parametrize("line", RESTARTS)
def test_no_restarts_are_no_retries_and_contradict_none(line):
    line = line.replace("restarts=3", "restarts=0").replace("restarts 3", "restarts 0")
    assert read(2, line)[0].retry is None
    assert read(2, line, retry=Retry(2))[0].retry == Retry(2)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("horovodrun -np 2 --reset-limit 4 python3 t.py", "--reset-limit 4"),
        ("accelerate launch --num_processes 2 --max_restarts 3 t.py", "--max_restarts 3"),
    ],
)
def test_a_limit_that_a_launcher_itself_keeps_stays_its_own(line, kept):
    spec, _ = read(2, line)
    assert spec.retry is None
    assert kept in shlex.join((*spec.launcher_flags, *spec.command))
