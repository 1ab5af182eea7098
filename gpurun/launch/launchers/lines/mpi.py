"""The command lines of ``mpirun`` and ``horovodrun``. Pure.

Sources: `schizo_ompi.c` of Open MPI 4.1 and of PRRTE 3 (Open MPI 5); `options.c` of MPICH's Hydra and Intel's reference
of its own Hydra 2021; examples for HPE's PALS; `horovod.runner.launch` of Horovod 0.28.1.
"""

from __future__ import annotations

import re

from gpurun.errors import BadInput
from gpurun.launch.launchers.lines.flags import (
    CHOSEN,
    Counts,
    FoundFlag,
    Meaning,
    Typed,
    as_mpi,
    flags,
    kept_of,
    number_of,
    taken_of,
)

SENT = ("PATH", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
"""gpurun's own command line has these variables."""
OWN_PARAMETERS = frozenset({
    "btl_tcp_if_include", "btl_tcp_if_exclude", "oob_tcp_if_include", "oob_tcp_if_exclude", "plm_rsh_agent",
    "plm_rsh_args", "plm_ssh_agent", "plm_ssh_args", "plm_rsh_no_tree_spawn", "plm_ssh_no_tree_spawn", "plm",
    "orte_default_hostfile", "prte_default_hostfile", "rmaps_base_mapping_policy", "rmaps_base_ranking_policy",
    "rmaps_default_mapping_policy", "rmaps_default_ranking_policy",
})  # fmt: skip
"""MCA parameters for hosts, the way to them, and the order of ranks."""
PARAMETERS = ("--mca", "--gmca", "--omca", "--gomca", "--pmca", "--prtemca", "--pmixmca")
MAPPED = "gpurun gives ranks their GPUs host by host (--map-by slot)"
SAME = "gpurun does the same by itself"
UNBOUND = "gpurun does not bind ranks to cores"
OTHER = "flags of another MPI: gpurun starts Open MPI's mpirun"


def _decided(each: FoundFlag) -> str:
    """Return why gpurun leaves out a flag that it keeps with other values; "" = it keeps the flag."""
    if each.name in PARAMETERS and each.values[0] in OWN_PARAMETERS:
        return CHOSEN
    if each.name in ("--map-by", "--rank-by") and each.values[0].partition(":")[0] != "slot":
        return MAPPED
    if each.name == "-x" and each.values[0] in SENT:
        return SAME
    return ""


def _slots(found: list[FoundFlag]) -> int | None:
    """Return the sum of the slots that ``-H a:4,b:4`` names, so many processes start; None if it names none."""
    hosts = [host for each in found if each.name in ("-H", "--host") for host in each.values[0].split(",")]
    slots = [host.rpartition(":")[2] for host in hosts]
    return sum(map(int, slots)) if slots and all(re.fullmatch("[0-9]{1,5}", each) for each in slots) else None


def _mpirun(found: list[FoundFlag], words: tuple[str, ...], _interpreter: tuple[str, ...]) -> Meaning:
    if ":" in words:
        raise BadInput(
            "mpirun: the command starts several programs (':'), but all ranks of a job run the same command",
            hint="start one program that decides by its rank what to run, or submit a job for each program",
        )
    env = dict[str, str]()
    kept, taken = list[FoundFlag](), [each for each in found if each.flag.does == "taken"]
    for each in found:
        name, equals, value = each.values[0].partition("=") if each.name == "-x" else ("", "", "")
        if why := _decided(each):
            taken.append(each._replace(flag=each.flag._replace(does="taken", why=why)))
        elif equals:
            env[name] = value
        elif each.name in ("--genv", "--env"):
            name, _, value = each.values[0].partition("=")
            env[name] = each.values[1] if len(each.values) == 2 else value
        elif each.flag.does == "kept":
            kept.append(each)
    ranks = number_of("mpirun", found, "--np", "-n", "-c", "--n")
    counts = Counts(_slots(found) if ranks is None else ranks)
    return Meaning(words, kept_of(kept), taken_of(taken), env, counts)


MPIRUN = Typed(
    "mpirun", "mpirun",
    ("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra",
     "mpirun.mpich", "mpiexec.mpich"), (),
    {
        **flags(
            "taken",
            "--np= -n= --n= -c= -H= --host= --hosts= --hostfile= --machinefile= --default-hostfile= -f= -N= "
            "--npernode= --pernode --npersocket= --ppn= --perhost= --rankfile= --rf= --nolocal --nooversubscribe "
            "--oversubscribe --iface= --launcher= --hetero-nodes --launch-agent= --do-not-resolve --uniform-nodes "
            "--novm --max-vm-size= --machine= --machines= --machinelist= --hostlist= --rankmap= --rr --grr= "
            "--hosts-group= --hybrid-hosts --skip-launch-node --order-nodes= --localhost= --launcher-exec= "
            "--bootstrap= --bootstrap-exec= --gpus-per-proc= --gpu-subdevs-per-proc=",
            CHOSEN,
        ),
        **flags("taken", "--bynode --byslot --byboard --bycore --bysocket --loadbalance --ppr=", MAPPED),
        **flags("taken", "--allow-run-as-root --genvall --envall", SAME),
        **flags("taken", "--output-filename= --output-directory= --outfile-pattern= --errfile-pattern= --xterm= "
                "--outfile= --errfile= --output-from= --prepend-rank --prepend-pattern= -l --label --line-buffer "
                "--ordered-output --demux=",
                "gpurun keeps the output of every rank: `gpurun logs --rank N`"),
        **flags("taken", "--binding= --membind= --topolib= --cpu-bind= --gpu-bind= --mem-bind= --depth=", UNBOUND),
        **flags("taken", "--rmk= --usize= --nameserver= --pmi-port --print-all-exitcodes --print-rank-map --info "
                "--profile --enable-x --disable-x --enable-auto-cleanup --disable-auto-cleanup "
                "--enable-hostname-propagation --disable-hostname-propagation --silent-abort --cleanup "
                "--branch-count= --no-vni --no-transfer --pmi=", OTHER),
        **flags("taken", "--max-restarts=", "gpurun does not restart a failed rank; `gpurun submit --max-restarts N` "
                "restarts a job after a host's fault"),
        **flags(
            "kept",
            "-x= --prefix= --noprefix --mca== --gmca== --omca== --gomca== --pmca== --prtemca== --pmixmca== --am= "
            "--amca= --tune= --path= --runtime-options= --stream-buffering= --forward-signals= --report-pid= "
            "--report-uri= --show-progress --leave-session-attached --debug-daemons --with-ft= --display-comm "
            "--display-devel-allocation --display-diffable-map --tag-output --timestamp-output "
            "--report-bindings --wdir= --wd= --bind-to= --map-by= --rank-by= --bind-to-core "
            "--bind-to-none --bind-to-socket --display-map --display-allocation --display-devel-map --display= "
            "--output= -q --quiet -v --verbose --merge-stderr-to-stdout --use-hwthread-cpus --enable-recovery "
            "--disable-recovery --continuous --abort-on-error --tmpdir= --report-child-jobs-separately --personality= "
            "--debug-daemons-file --report-state-on-timeout --get-stack-traces --spawn-timeout= --no-aggregate-help "
            "--gpu-support= --memory-alloc-kinds= --rtos= --index-argv-by-rank --set-cwd-to-session-dir --xml "
            "--display-comm-finalize --initial-errhandler=",
        ),
        **flags("read", "--genv==? --env==?"),
        **flags("refused", "--timeout=", "write `gpurun submit --time-limit 1h`"),
        **flags("refused", "--preload-files= --preload-binary -s", "put the files into the workdir, or use --data"),
        **flags("refused", "--app= --configfile=",
                "write the program and its arguments in the command: all ranks of a job run the same command"),
        **flags("refused", "--stdin=", "remove the flag: gpurun gives each rank /dev/null as stdin"),
        **flags("refused", "--cpus-per-proc= --cpus-per-rank= --cpu-set= --cpu-list=",
                "remove the flag, or write `numactl` in front of the program to bind ranks to cores"),
        **flags("refused", "--genvlist= --genvnone --envlist= --envnone --genvexcl= --envexcl=",
                "write -x NAME for each variable"),
        **flags("refused", "--dvm= --hnp= --ompi-server= --wait-for-server --server-wait-time= --do-not-launch "
                "--stop-on-exec --stop-in-init", "remove the flag: gpurun itself starts mpirun and waits for its end"),
        **flags("refused", "-d", "remove -d: the flag starts a debugger in Open MPI, and sets cores in other MPIs"),
        **flags("refused", "--debug --tv --debugger= --gdb --gtool= --gtoolfile= --trace --check-mpi",
                "write the tool in front of the program: mpirun TOOL PROGRAM"),
        **flags("refused", "-V --version -h --help", "to see what the flag prints, run: docker run IMAGE mpirun …"),
    },
    spelled=as_mpi, read=_mpirun,
)  # fmt: skip


def _horovodrun(found: list[FoundFlag], words: tuple[str, ...], _interpreter: tuple[str, ...]) -> Meaning:
    names = {each.name for each in found}
    most = number_of("horovodrun", found, "--max-np", "--max-num-proc")
    ranks = most if most is not None else number_of("horovodrun", found, "-np", "--num-proc")
    least = number_of("horovodrun", found, "--min-np", "--min-num-proc")
    return Meaning(
        words, kept_of(found), taken_of(found), counts=Counts(ranks, least),
        controller="mpi" if "--mpi" in names else "gloo" if "--gloo" in names else None,
    )  # fmt: skip


HOROVODRUN = Typed(
    "horovodrun", "horovod", ("horovodrun",), ("horovod.runner.launch",),
    {
        **flags(
            "taken",
            "-np= --num-proc= --min-np= --min-num-proc= --max-np= --max-num-proc= --slots-per-host= --slots= -H= "
            "--hosts= -hostfile= --hostfile= -p= --ssh-port= -i= --ssh-identity-file= --network-interfaces= "
            "--network-interface= --host-discovery-script=",
            CHOSEN,
        ),
        **flags("taken", "--disable-cache", SAME),
        **flags("taken", "--output-filename=", "gpurun keeps the output of every rank: `gpurun logs --rank N`"),
        **flags(
            "kept",
            "--verbose --start-timeout= --fusion-threshold-mb= --cycle-time-ms= --cache-capacity= "
            "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
            "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune "
            "--autotune-log-file= --autotune-warmup-samples= --autotune-steps-per-sample= "
            "--autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise= --elastic-timeout= --reset-limit= "
            "--blacklist-cooldown-range== --timeline-filename= --timeline-mark-cycles --no-timeline-mark-cycles "
            "--stall-check --no-stall-check --stall-check-warning-time-seconds= --stall-check-shutdown-time-seconds= "
            "--mpi-threads-disable --no-mpi-threads-disable --mpi-args= --tcp --binding-args= --num-nccl-streams= "
            "--thread-affinity= --gloo-timeout-seconds= --log-level= --log-with-timestamp --log-without-timestamp "
            "--log-hide-timestamp --no-log-hide-timestamp "
            "-prefix-timestamp --prefix-output-with-timestamp",
        ),
        **flags("read", "--gloo --mpi"),
        **flags("refused", "--jsrun", "remove the flag: gpurun starts Horovod by Gloo or, with --mpi, by MPI"),
        **flags("refused", "--config-file=",
                "write the settings of the file as flags, or under `horovod:` in a recipe"),
        **flags("refused", "-v --version -cb --check-build",
                "to see what the flag prints, run: docker run IMAGE horovodrun …"),
    },
    read=_horovodrun,
)  # fmt: skip
