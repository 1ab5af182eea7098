"""Messages arrive at a real HTTP server, a sendmail and a command; what goes wrong is said without secrets."""

from __future__ import annotations

import email
import json
import threading
from email import policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpurun import notify as sending
from gpurun.jobs.record import FirstFailure, JobRecord, State
from gpurun.jobs.spec import EVENTS, Grant, JobSpec, NotifyWish, notify_wish
from gpurun.notify import NotSent, payload, send, slack

NAME = "a'; rm -rf / <!channel> & \x85\u2028Bcc: x@evil.example"


def document(events=("end", "failure"), name=NAME, **changes):
    failure = FirstFailure("rank 3 on h2 failed first", rank=3, host="h2", exit_code=1)
    record = JobRecord(
        id="j-0a1b2c3d", name=name, owner="alice", owner_uid=1000, inventory="/i.yaml", gpus=4, state=State.FAILED,
        submitted_s=1.0, queued_s=1.0, attempt=2, reason="rank 3 on h2 failed first\nBcc: y@evil.example",
        first_failure=failure, ended_s=9.0,
    ).but(**changes)  # fmt: skip
    spec = JobSpec(name, "i", 4, ("true",), project="cats")
    return payload(events, record, spec, (Grant("h1", (0, 1)), Grant("h2", (0, 1))), head="head-1", now_s=10.0)


@pytest.fixture
def server():
    """A web server; `answers` are the codes it gives, the last one again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.headers, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            code = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(code)
            if code == 307:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args):
            pass

    got, answers = [], [200]
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.got, made.answers, made.url = got, answers, f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def tell(wish, **options):
    pauses = []
    send(wish, document(**options), sleep=pauses.append)
    return pauses


def test_a_webhook_gets_the_document(server):
    assert tell(NotifyWish("webhook", f"{server.url}/hook")) == []
    ((path, headers, got),) = server.got
    assert (path, headers["Content-Type"]) == ("/hook", "application/json")
    assert got == document()
    assert (got["event"], got["state"], got["failed_rank"], got["hosts"], got["gpus"]) == (
        "end", "FAILED", 3, ["h1", "h2"], 4,
    )  # fmt: skip


def test_slack_gets_text_that_mentions_nobody(server, tmp_path):
    (tmp_path / "url").write_text(f"{server.url}/services/T/B/secret\n")
    tell(NotifyWish("slack", str(tmp_path / "url")))
    ((path, _, got),) = server.got
    assert path == "/services/T/B/secret"
    assert "&lt;!channel&gt; &amp;" in got["text"]
    assert "<" not in got["text"]
    assert "\n" not in got["text"]
    assert got["mrkdwn"] is False
    assert got == slack(document())


def test_a_server_that_fails_is_asked_again(server):
    server.answers[:] = [503, 500, 200]
    assert tell(NotifyWish("webhook", server.url)) == [1.0, 3.0]
    assert len(server.got) == 3
    server.answers[:] = [404]
    with pytest.raises(NotSent, match="the server answered 404"):
        tell(NotifyWish("webhook", server.url))
    assert len(server.got) == 6


def test_a_redirect_is_not_followed(server):
    server.answers[:] = [307]
    with pytest.raises(NotSent, match="307"):
        tell(NotifyWish("webhook", server.url))
    assert {path for path, *_ in server.got} == {""} or {path for path, *_ in server.got} == {"/"}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/SECRET", "https://127.0.0.1:1/SECRET", "http://no.invalid/SECRET", "file:///SECRET",
        "http://[SECRET", "SECRET", "", "http://a b/SECRET", "http://\xe9/SECRET", "http://SECRET\u2100@h/",
    ],
)  # fmt: skip
def test_no_error_holds_the_url(tmp_path, url):
    (tmp_path / "url").write_text(url)
    with pytest.raises(NotSent) as caught:
        tell(NotifyWish("webhook", str(tmp_path / "url")))
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\0" * 9999])
def test_a_file_without_a_url_is_reported(tmp_path, content):
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotSent, match="url"):
        tell(NotifyWish("slack", str(path)))


@pytest.fixture
def sendmail(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "sendmail"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/argv\ncat > {tmp_path}/mail\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("name", [NAME, "x\r\nBcc: z@evil.example", "\x1b[2J", "ü" * 200, "=?utf-8?q?=0ABcc:_a@b?="])
def test_a_mail_has_its_own_headers_only(sendmail, name):
    tell(NotifyWish("mail", "alice@example.com"), name=name)
    assert (sendmail / "argv").read_text().splitlines() == ["-i", "--", "alice@example.com"]
    mail = email.message_from_bytes((sendmail / "mail").read_bytes(), policy=policy.default)
    assert sorted(mail.keys()) == sorted(
        ["To", "Subject", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding", "MIME-Version"]
    )
    assert mail["To"] == "alice@example.com"
    assert "j-0a1b2c3d" in mail["Subject"]
    assert "failed_host: h2" in mail.get_content()


def test_a_command_gets_the_document_on_stdin(tmp_path):
    out = tmp_path / "o'ut"
    script = tmp_path / "tell"
    script.write_text('#!/bin/sh\ncat > "$1"\n')
    script.chmod(0o755)
    tell(notify_wish(f'command:{script} "{out}"'))
    assert json.loads(out.read_text()) == document()


@pytest.mark.parametrize(("command", "why"), [("false", "exit code 1"), ("no-such-program-here", "cannot be run"),
                                              ("sleep 60", "did not end within")])  # fmt: skip
def test_a_command_that_fails_is_reported(monkeypatch, command, why):
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.2)
    with pytest.raises(NotSent, match=why):
        tell(NotifyWish("command", command))


def test_each_event_has_a_sentence():
    texts = [
        document(("start",), "n", state=State.RUNNING)["text"],
        document(("preemption",), "n", state=State.QUEUED)["text"],
        document(("failure",), "n", state=State.QUEUED)["text"],
        document(("end",), "n", state=State.SUCCEEDED, reason="")["text"],
        document(("idle",), "n", state=State.RUNNING, reason="all GPUs have been less than 5 % busy")["text"],
    ]
    assert texts[0] == "gpurun job j-0a1b2c3d (n), 4 GPUs on 2 hosts, started"
    assert "was preempted and waits again" in texts[1]
    assert "failed and starts again: rank 3" in texts[2]
    assert texts[3].endswith("succeeded")
    assert texts[4] == "gpurun job j-0a1b2c3d (n), 4 GPUs on 2 hosts, is idle: all GPUs have been less than 5 % busy"


# -- what people write -------------------------------------------------------------------------------------


def test_targets_as_people_write_them():
    assert notify_wish("mail:alice@example.com").on == EVENTS
    assert notify_wish("failure,end=slack:~/.slack") == NotifyWish("slack", "~/.slack", ("end", "failure"))
    assert notify_wish("webhook:https://h.example/x").is_file is False
    assert notify_wish("webhook:hook-url").is_file


@pytest.mark.parametrize(
    "text",
    [
        "", "mail", "mail:", "mail:alice", "mail:-f@x.y z", "mail:a@b\nBcc: c@d", "mail:a@b,c@d", "fax:1",
        "never=mail:a@b",        "=mail:a@b", "slack:https://hooks.slack.com/services/T/B/X", "webhook:https://u:p@h/", "webhook:https://h/?token=1",
        "webhook:http://", "command:'", "mail:" + "a" * 9999 + "@b",
    ],
)  # fmt: skip
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ValueError):
        notify_wish(text)
