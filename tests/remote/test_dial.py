"""Which of a host's addresses gpurun connects to: the first that answers, and soon."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from waiting import LIMIT_S

from gpurun.errors import HostUnreachable
from gpurun.remote import session, system_ssh
from gpurun.remote import session as dial
from gpurun.remote.route import resolve
from gpurun.remote.session import Address, Attempt, in_turn

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture
def soon(monkeypatch):
    """The next address after a moment; a test of the moment itself needs no more."""
    monkeypatch.setattr(dial, "NEXT_ADDRESS_S", 0.05)


@pytest.fixture
def addresses():
    """Addresses of this machine that answer, refuse, or drop packets."""
    with ExitStack() as stack:

        def address(kind):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            if kind == "mute":  # its kernel drops the questions, because others wait
                sock.listen(0)
                stack.enter_context(socket.socket()).connect(sock.getsockname())
            elif kind == "good":
                sock.listen(8)
            return Address(V4, socket.SOCK_STREAM, 0, "", sock.getsockname())

        yield address


class Asked(Attempt):
    """An attempt that counts what it is told."""

    def __init__(self, seconds=LIMIT_S):
        super().__init__(time.monotonic() + seconds)
        self.told = []
        self.asks = lambda: self.told.append("asks")
        self.answered = lambda: self.told.append("answered")


def test_a_first_address_that_drops_packets_does_not_eat_the_time(addresses):
    """With the real moment between addresses."""
    mute, good = addresses("mute"), addresses("good")
    attempt = Asked()
    began_s = time.monotonic()
    with dial.dial([mute, good], attempt) as sock:
        assert sock.getpeername() == good.address and sock.gettimeout() is None
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert attempt.told == ["asks", "asks", "answered"]


def test_an_address_that_answers_is_the_only_one_asked(addresses, soon):
    attempt = Asked()
    with dial.dial([addresses("good"), addresses("good")], attempt):
        assert attempt.told == ["asks", "answered"]


def test_after_a_refusal_the_next_address_is_asked_at_once(addresses, monkeypatch):
    monkeypatch.setattr(dial, "NEXT_ADDRESS_S", LIMIT_S)
    good = addresses("good")
    with dial.dial([addresses("closed"), good], Asked(2 * LIMIT_S)) as sock:
        assert sock.getpeername() == good.address


def test_an_address_without_a_family_here_is_skipped(addresses):
    good = addresses("good")
    with dial.dial([Address(12345, socket.SOCK_STREAM, 0, "", ("::1", 22, 0, 0)), good], Asked()) as sock:
        assert sock.getpeername() == good.address


def test_if_none_answers_the_attempt_ends_in_time(addresses, soon):
    attempt = Asked(0.5)
    with pytest.raises(TimeoutError):
        dial.dial([addresses("mute"), addresses("mute")], attempt)
    assert attempt.told == ["asks", "asks"]


def test_the_refusal_is_told_if_all_refuse(addresses, soon):
    with pytest.raises(ConnectionRefusedError):
        dial.dial([addresses("closed"), addresses("closed")], Asked())


def test_no_address_at_all():
    with pytest.raises(TimeoutError):
        dial.dial([], Asked())


def test_a_slow_first_address_still_wins_over_a_mute_second(addresses, soon):
    """The first keeps its place: it is not given up when the second is asked."""
    late = addresses("mute")
    listener = socket.socket()
    listener.close()
    good = addresses("good")
    with dial.dial([late, addresses("mute"), good], Asked()) as sock:
        assert sock.getpeername() == good.address


def test_the_losers_are_closed(addresses, soon, monkeypatch):
    made = []
    real = dial._begun
    monkeypatch.setattr(dial, "_begun", lambda *words: made.append(real(*words)) or made[-1])
    with dial.dial([addresses("mute"), addresses("mute"), addresses("good")], Asked()) as winner:
        assert [sock.fileno() >= 0 for sock in made] == [sock is winner for sock in made]


def test_an_attempt_that_is_given_up_ends(addresses, soon):
    attempt, ended = Asked(), []

    def connect():
        with pytest.raises(OSError):
            dial.dial([addresses("mute"), addresses("mute"), addresses("mute")], attempt)
        ended.append(True)

    attempt.deadline_s = time.monotonic() + 1.0
    thread = threading.Thread(target=connect)
    thread.start()
    attempt.abort()
    thread.join(LIMIT_S)
    assert ended


def each(family, *names):
    return [Address(family, socket.SOCK_STREAM, 6, "", (name, 22)) for name in names]


def test_families_take_turns():
    a, b, c, d, e = [*each(V6, "a", "b", "c"), *each(V4, "d", "e")]
    assert in_turn([a, b, c, d, e]) == [a, d, b, e, c]
    assert in_turn([d, a]) == [d, a] and in_turn([]) == []


# -- both transports ---------------------------------------------------------------------------------------------


@pytest.fixture
def route(net):
    return resolve(net.host("gpu1", net.sshd(start=False)))


def test_paramiko_connects_to_the_address_that_answers(addresses, soon, route, monkeypatch):
    good = addresses("good")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [addresses("mute"), good])
    with session._connect_tcp(route, Asked()) as sock:
        assert sock.getpeername() == good.address


def test_ssh_is_told_which_kind_of_address_answers(addresses, soon, route, monkeypatch):
    """``ssh`` would give a first address that drops packets all the time that it has."""
    mute, good = addresses("mute"), addresses("good")
    real = dial._begun
    monkeypatch.setattr(dial, "_begun", lambda address, *rest: real(address._replace(family=V4), *rest))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [mute._replace(family=V6), good])
    assert system_ssh._family(route, Asked()) == "inet"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [good])
    assert system_ssh._family(route, Asked()) is None


def test_a_name_without_an_address_is_left_to_ssh(route, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert system_ssh._family(route, Asked()) is None
    with pytest.raises(HostUnreachable, match="cannot be resolved"):
        session._connect_tcp(route, Asked())


def test_if_no_kind_of_address_answers_the_host_is_unreachable(addresses, soon, route, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [addresses("mute")._replace(family=V6), addresses("mute")])
    monkeypatch.setattr(dial, "_begun", lambda *_: (_ for _ in ()).throw(OSError(101, "Network is unreachable")))
    with pytest.raises(HostUnreachable, match="network is unreachable"):
        system_ssh._family(route, Asked())
