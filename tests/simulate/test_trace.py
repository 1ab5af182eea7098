"""Traces: our columns, others' names for them, and lines that are wrong."""

import pytest

from gpurun.errors import BadInput
from gpurun.simulate.replay import parse_trace, read_trace

HEAD = "job_id,submit_time_s,duration_s,gpus"


def parse(*lines):
    return parse_trace([line + "\n" for line in lines], "t.csv")


def test_all_columns():
    (job,) = parse(
        HEAD + ",gpus_per_host,generation,pool,priority,preemptible,time_limit_s", "a,1.5,10,4,2,pascal,p,-1,true,20"
    )
    assert (job.submitted_s, job.duration_s, job.gpus, job.gpus_per_host) == (1.5, 10.0, 4, 2)
    assert (job.generation, job.pool, job.priority, job.preemptible, job.time_limit_s) == (
        "pascal",
        "p",
        -1,
        True,
        20.0,
    )


@pytest.mark.parametrize(
    "head",
    [
        "job_id,submission_time,duration,num_gpu",
        "JOB_ID, submit_time ,duration,gpu_num",
        "id,timestamp,runtime,num_gpus",
    ],
)
def test_names_that_published_traces_use(head):
    (job,) = parse(head, "a,3,10,4")
    assert (job.job_id, job.submitted_s, job.duration_s, job.gpus) == ("a", 3.0, 10.0, 4)


def test_dates_as_helios_and_philly_write_them():
    jobs = parse("timestamp,duration,num_gpus", "2017-10-09 07:01:55,66.0,1", "2017-10-09 07:02:55,66.0,1")
    assert jobs[1].submitted_s - jobs[0].submitted_s == 60.0
    assert jobs[0].job_id == "line-2"


def test_in_order_of_submission_and_then_of_the_file():
    assert [job.job_id for job in parse(HEAD, "c,5,1,1", "b,1,1,1", "", "a,1,1,1")] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,0,x,1", "t.csv:3: duration_s 'x' must be a number of at least 0"),
        ("a,0,-1,1", "duration_s '-1'"),
        ("a,0,nan,1", "duration_s 'nan'"),
        ("a,0,inf,1", "duration_s 'inf'"),
        ("a,yesterday,1,1", "submit_time_s 'yesterday'"),
        ("a,0,1,0", "t.csv:3: gpus '0' must be a whole number from 1 to 1000000"),
        ("a,0,1,-1", "gpus '-1'"),
        ("a,0,1,3.5", "gpus '3.5'"),
        ("a,0,1,1e999", "gpus '1e999'"),
        ("a,0,1", "t.csv:3: the line has 3 columns, fewer"),
        ('a,0,1,"1', "t.csv:3: the trace is not valid CSV"),
        ("ok,0,1,1", "t.csv:3: job_id 'ok' is also on line 2"),
        ("a'; touch /tmp/x #,\x00,1,1", "t.csv:3"),
    ],
)
def test_a_malformed_line_is_named(line, said):
    with pytest.raises(BadInput) as caught:
        parse(HEAD, "ok,0,1,1", line)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("lines", [[], ["a,b"], [HEAD]])
def test_no_columns_or_no_jobs(lines):
    with pytest.raises(BadInput, match=r"t\.csv"):
        parse(*lines)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "no'such.csv"):
        with pytest.raises(BadInput, match="cannot read the trace"):
            read_trace(path)
    (tmp_path / "latin.csv").write_bytes(b"job_id\xff,1")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_trace(tmp_path / "latin.csv")


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    (tmp_path / "bom.csv").write_text("\ufeff" + HEAD + "\na,0,1,1\n", encoding="utf-8")
    assert read_trace(tmp_path / "bom.csv")[0].job_id == "a"
