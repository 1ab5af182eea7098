"""Who gets in: whoever has the token, by the name of this machine, and nobody else."""

from __future__ import annotations

import time

import pytest

from gpurun.views.tensorboard import Guard, Shown, ShownRun

TOKEN = "t0ken-of-this-call"


def inner(environ, start):
    start("200 OK", [("Content-Length", "5")])
    assert "HTTP_COOKIE" not in environ, "no plugin gets to see it"
    return [b"board"]


@pytest.fixture
def shown(tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "view").mkdir()
    return Shown(tmp_path / "view", [ShownRun("<b>run", tmp_path / "outputs")])


@pytest.fixture
def ask(shown):
    guard = Guard(inner, shown, TOKEN)

    def ask(path="/", query="", cookie="", host="127.0.0.1:6006"):
        told = {}

        def start(status, headers):
            told.update(status=int(status.split()[0]), headers=dict(headers))

        environ = {"PATH_INFO": path, "QUERY_STRING": query, "HTTP_COOKIE": cookie, "HTTP_HOST": host}
        body = b"".join(guard(environ, start))
        return told["status"], told["headers"], body

    ask.guard = guard
    return ask


@pytest.fixture
def cookie(ask):
    _, headers, _ = ask(query=f"token={TOKEN}")
    return headers["Set-Cookie"].partition(";")[0]


def test_the_token_becomes_a_cookie_that_lets_in(ask, cookie):
    status, headers, _ = ask("/data/x", query=f"token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/data/x")
    assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in headers["Set-Cookie"].split(";")}
    assert ask(cookie=cookie)[::2] == (200, b"board")
    assert ask(cookie=f"other=1; {cookie}")[0] == 200


@pytest.mark.parametrize(
    ("query", "sent"),
    [("", ""), ("token=", ""), ("token=x", ""), ("token=%ff%00", ""), ("", "a=b; ;;=\x00\x07"), ("", "gpurun_=x"),
     ("token=\u00e9", "\u00e9")],
)  # fmt: skip
def test_nobody_else_gets_in(ask, query, sent):
    status, _, body = ask(query=query, cookie=sent)
    assert status == 403 and b"whole URL" in body


def test_a_cookie_of_another_call_does_not_let_in_and_does_not_get_in_the_way(ask, cookie, shown):
    other = Guard(inner, shown, "another")
    assert other._cookie not in cookie
    name, _, value = cookie.partition("=")
    assert ask(cookie=f"{other._cookie}=another; {name}={value}")[0] == 200
    assert ask(cookie=f"{name}=another")[0] == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:6006", 200), ("evil.example:6006", 403), ("", 403),
     ("127.0.0.1.evil.example", 403)],
)  # fmt: skip
def test_a_name_of_another_site_that_means_this_machine_is_refused(ask, cookie, host, status):
    assert ask(cookie=cookie, host=host)[0] == status


def test_only_who_is_let_in_keeps_it_from_ending(ask, cookie):
    ask.guard.asked_s -= 100
    ask()
    assert time.monotonic() - ask.guard.asked_s > 99
    ask(cookie=cookie)
    assert time.monotonic() - ask.guard.asked_s < 1


def test_traces_are_listed_and_sent_and_their_names_are_only_names(ask, cookie, shown, tmp_path):
    hostile = tmp_path / "outputs" / '<script>"\r\nX: y.trace.json'
    hostile.write_bytes(b"[{}]")
    shown.refresh()
    assert ask("/traces")[0] == 403
    _, headers, page = ask("/traces", cookie=cookie)
    assert b"<script>" not in page and b"<b>run" not in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, headers, body = ask("/traces/0", cookie=cookie)
    assert (status, body, headers["Content-Length"]) == (200, b"[{}]", "4")
    assert headers["Content-Type"] == "application/octet-stream"
    assert not {"\r", "\n"} & set(headers["Content-Disposition"])


@pytest.mark.parametrize("number", ["1", "-1", "x", "", "99999999999999999999", "../0", "\u0661"])
def test_there_is_no_other_trace(ask, cookie, shown, tmp_path, number):
    (tmp_path / "outputs" / "a.trace.json").write_bytes(b"[]")
    shown.refresh()
    assert ask(f"/traces/{number}", cookie=cookie)[0] in (200, 404)
    assert ask(f"/traces/{number}", cookie=cookie)[0] == (200 if number == "../0" else 404)


def test_a_trace_that_has_become_a_link_or_is_gone_is_not_sent(ask, cookie, shown, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    trace = tmp_path / "outputs" / "sub" / "a.trace.json"
    trace.parent.mkdir()
    trace.write_bytes(b"[]")
    shown.refresh()
    trace.unlink()
    assert ask("/traces/0", cookie=cookie)[0] == 404
    trace.symlink_to(tmp_path / "secret")
    assert ask("/traces/0", cookie=cookie)[0] == 404
    trace.unlink()
    trace.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.trace.json").write_bytes(b"secret")
    trace.parent.symlink_to(tmp_path / "elsewhere")
    assert ask("/traces/0", cookie=cookie)[0] == 404
