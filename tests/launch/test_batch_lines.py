"""The ``#SBATCH`` lines of scripts: not obeyed, and what differs from the job is said with gpurun's flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placed_gangs import SPEC

from gpurun.errors import BadInput
from gpurun.jobs.spec import Constraints
from gpurun.launch.launchers.choosing import ProgramClues, choose_launcher
from gpurun.launch.launchers.line import about_directives, directives_of, launches_in

SPEC8 = replace(SPEC, gpus=8, name="x")
CASES = [
    # lines, what to add, what is left out
    ("--gpus=8", "", ""),
    ("--gpus 16", "-n 16", ""),
    ("--nodes=2\n--gres=gpu:a100:4", "--gpus-per-host 4", ""),
    ("-N2\n--gpus-per-node=8 # both", "-n 16 --gpus-per-host 8", ""),
    ("--ntasks=4\n--gpus-per-task=2", "", ""),
    ("--nodes=4\n--ntasks-per-node=2\n--gpus-per-task 1", "--gpus-per-host 2", ""),
    ("-t 1-12:30:00", "--time-limit 2190m", ""),
    ("--time=24:00:00", "--time-limit 24h", ""),
    ("--time=90", "--time-limit 90m", ""),
    ("--time=1:01", "--time-limit 61s", ""),
    ("--time=UNLIMITED\n--mem=0", "", ""),
    ("--mem=64G", "--memory 64GiB", ""),
    ("--mem=500", "--memory 500MiB", ""),
    ("-c 8\n--ntasks-per-node=4", "--cpus 32", ""),
    ("--job-name 'a b'", "--name 'a b'", ""),
    ("--job-name=x", "", ""),
    ("-p gpu\n--array=1-4\n--exclusive --qos=x", "", "-p=gpu --array=1-4 --exclusive --qos=x"),
    ("--time=\n--gpus=all\n--nodes=0\n--gres=nic:2\n--mem=x", "", ""),
]


def text_of(lines):
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines.split("\n")) + "##SBATCH --gpus=99\n"


def test_what_a_script_asks_slurm_for_and_the_job_does_not_have_is_said_with_gpuruns_flags():
    for lines, add, left in CASES:
        said = "\n".join(about_directives(directives_of(text_of(lines)), "a.sh", SPEC8))
        assert (f"to ask for the same, add: {add}\n" in f"{said}\n") == bool(add), lines
        assert (f"left out: {left} (" in said) == bool(left), lines
        assert bool(said) == bool(add or left), lines
    same = replace(SPEC8, time_limit_s=5400.0, memory_mib=1024, cpus=2.0, constraints=Constraints(gpus_per_host=4))
    assert not about_directives(directives_of(text_of("-N 2\n-G 8\n-t 90\n--mem=1G\n-c 2")), "a.sh", same)


@pytest.mark.parametrize("calls", ["srun python3 x.py", "python3 x.py", "torchrun x.py"])
def test_submit_says_it_with_the_launcher_or_with_the_refusal(calls):
    text = f"#SBATCH --nodes=2 --gpus-per-node=8\n#SBATCH --time=1:00:00\n{calls}\n"
    found = ProgramClues(launches=launches_in(text), starts="a.sh", directives=directives_of(text), batch="a.sh")
    try:
        said = "\n".join(choose_launcher(SPEC8, (), found).said)
    except BadInput as refused:
        said = refused.hint
    assert "does not read the #SBATCH lines of a.sh" in said
    assert "add: -n 16 --gpus-per-host 8 --time-limit 1h" in said


def test_hostile_lines_are_read_quickly():
    for line in ("'", "-" * 5000, "--gpus=" + "9" * 1000, "-N\0", "--time=" + ":" * 1000, "- -- --= -N= =", "é"):
        assert isinstance(about_directives(directives_of(text_of("\n".join([line] * 2000))), "a.sh", SPEC8), tuple)
