import getpass
import subprocess
from pathlib import Path

import pytest

from gpurun.errors import BadInput
from gpurun.remote import Target, ssh_config
from gpurun.remote.ssh_config import resolve


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()

    def make(text, name="config"):
        path = tmp_path / ".ssh" / name
        path.write_text(text)
        return str(path)

    return make


def route(config_file, name="gpu1", **kw):
    return resolve(Target(name, ssh_config=config_file, **kw))


def test_defaults(config):
    found = route(config(""))
    assert (found.hostname, found.port, found.user) == ("gpu1", 22, getpass.getuser())
    assert found.identity_files[0] == str(Path("~/.ssh/id_ed25519").expanduser())
    assert found.known_hosts[0] == str(Path("~/.ssh/known_hosts").expanduser())
    assert found.jump is None and found.proxy_command is None


def test_first_value_wins_and_identities_add_up(config):
    found = route(
        config(
            "Host gpu*  !gpu9\n  User train\n  Port=2201\n  IdentityFile ~/a\n"
            "Host *\n  User other\n  Port 22\n  HostName 10.0.0.%h\n  IdentityFile /k/%r@%n\n"
            '  UserKnownHostsFile "/with space/kh" ~/kh2\n  GlobalKnownHostsFile none\n'
        )
    )
    assert (found.hostname, found.port, found.user) == ("10.0.0.gpu1", 2201, "train")
    assert found.identity_files == (str(Path("~/a").expanduser()), "/k/train@gpu1")
    assert found.known_hosts == ("/with space/kh", str(Path("~/kh2").expanduser()))


def test_negated_pattern(config):
    assert route(config("Host gpu* !gpu9\n  User train\n"), "gpu9").user == getpass.getuser()


def test_target_wins_over_config(config):
    text = "Host gpu1\n HostName 10.0.0.1\n User a\n Port 1\n"
    found = route(config(text), address="10.9.9.9", user="b", port=2)
    assert (found.hostname, found.user, found.port) == ("10.9.9.9", "b", 2)


def test_an_address_may_itself_be_a_name_of_the_config(config):
    found = route(config("Host gpu1\n User a\nHost login\n HostName 10.0.0.7\n User b\n Port 2200\n"), address="login")
    assert (found.hostname, found.user, found.port) == ("10.0.0.7", "a", 2200)


def test_include_at_the_top_is_read_without_openssh(config, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    config("Host gpu1\n  User inner\nHost other\n  Port 9\n", "inc.conf")
    found = route(config("Include inc.conf\nPort 2222\nHost gpu1\n  User outer\n"))
    assert (found.user, found.port) == ("inner", 2222)


def test_include_that_includes_itself(config):
    with pytest.raises(BadInput, match="loop"):
        route(config("Include config\n"))


@pytest.mark.parametrize(
    "text",
    [
        "Host gpu*\n  Include inc.conf\n",
        "Match originalhost gpu1\n  User inner\n  Port 2222\n",
        'Match exec "true"\n  User inner\n  Port 2222\n',
    ],
)
def test_what_only_openssh_evaluates_is_left_to_it(config, text):
    config("User inner\nPort 2222\n", "inc.conf")
    # An absolute name: ssh itself takes ~ from the password database, not from $HOME.
    inc = str(Path(config("User inner\nPort 2222\n", "inc.conf")))
    found = route(config(text.replace("inc.conf", inc)))
    assert (found.user, found.port, found.hostname) == ("inner", 2222, "gpu1")
    assert found.jump is None


def test_ssh_g_says_the_same(config):
    text = (
        "Host gpu*\n  HostName %h.cluster\n  User u\n  Port 2200\n  ProxyJump me@bastion:2022\n  HostKeyAlias al\n"
        "  IdentitiesOnly yes\n"
    )
    plain = route(config(text))
    asked = route(config(text + 'Match exec "false"\n  User never\n'))
    assert plain.jump is not None and asked.jump is not None
    for name in ("hostname", "port", "user", "host_key_alias", "identities_only"):
        assert getattr(plain, name) == getattr(asked, name)
        assert getattr(plain.jump, name, None) == getattr(asked.jump, name, None)


def test_jumps_are_resolved_with_the_same_config(config):
    found = route(
        config("Host gpu1\n ProxyJump a,root@b:2022\nHost a\n HostName 1.1.1.1\nHost b\n HostName 2.2.2.2\n User x\n")
    )
    assert found.jump is not None and found.jump.jump is not None
    assert (found.jump.hostname, found.jump.port, found.jump.user) == ("2.2.2.2", 2022, "root")
    assert found.jump.jump.hostname == "1.1.1.1"


def test_proxyjump_none_and_order(config):
    assert route(config("Host gpu1\n ProxyJump none\nHost *\n ProxyJump b\n")).jump is None
    found = route(config("Host gpu1\n ProxyCommand nc %h %p\n ProxyJump b\n"))
    assert found.proxy_command == "nc gpu1 22" and found.jump is None


def test_jump_loop(config):
    with pytest.raises(BadInput, match="loop"):
        route(config("Host *\n ProxyJump b\n"))


def test_identity_agent(config, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/a.sock")
    assert route(config("")).identity_agent == "/a.sock"
    assert route(config("IdentityAgent none\n")).identity_agent is None
    assert route(config("IdentityAgent /b-%r.sock\nUser u\n")).identity_agent == "/b-u.sock"


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "a\nb", "a\0b"])
def test_names_that_would_be_options_or_two_words(config, name):
    with pytest.raises(BadInput):
        route(config(""), name)


@pytest.mark.parametrize(
    "text", ["Port abc\n", "ProxyJump a b\n", "Host gpu1\n HostName\n", 'IdentityFile "unclosed\nHost "x\n']
)
def test_wrong_values_say_where(config, text):
    with pytest.raises(BadInput):
        route(config(text))


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="no such"):
        route(str(tmp_path / "none"))


def test_the_configuration_is_read_once_for_a_thousand_hosts_and_ssh_is_not_asked(config, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    text = "".join(f"Host gpu-{i}\n  HostName 10.0.{i // 250}.{i % 250}\n" for i in range(100))
    file = config(text)
    before = ssh_config._parse_file.cache_info().misses
    for i in range(1000):
        route(file, f"gpu-{i % 100}")
    assert ssh_config._parse_file.cache_info().misses - before <= 2  # this file and the system's
