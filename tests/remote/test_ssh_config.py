"""Routes are what OpenSSH makes of its configuration."""

import getpass
import os
import pwd
import subprocess
import time
from pathlib import Path

import pytest
from waiting import until

from gpurun.errors import BadInput
from gpurun.remote import Target
from gpurun.remote import route as openssh
from gpurun.remote import route as ssh_config
from gpurun.remote.route import resolve, resolve_all

HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.fixture
def config(tmp_path):
    (tmp_path / "ssh").mkdir()

    def make(text, name="config"):
        path = tmp_path / "ssh" / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return make


def route(config_file, name="gpu1", **kw):
    return resolve(Target(name, ssh_config=config_file, **kw))


def test_defaults(config):
    found = route(config(""))
    assert (found.hostname, found.port, found.user) == ("gpu1", 22, getpass.getuser())
    assert f"{HOME}/.ssh/id_ed25519" in found.identity_files
    assert found.known_hosts[0] == f"{HOME}/.ssh/known_hosts"
    assert "/etc/ssh/ssh_known_hosts" in found.known_hosts
    assert found.jump is None and found.proxy_command is None and found.host_key_alias is None
    assert found.bind_address is None and found.certificate_files == ()


def test_first_value_wins_and_identities_add_up(config):
    found = route(
        config(
            "Host gpu*  !gpu9\n  User train\n  Port=2201\n  IdentityFile ~/a\n"
            "Host *\n  User other\n  Port 22\n  HostName 10.0.0.%h\n  IdentityFile /k/%r@%n\n"
            '  UserKnownHostsFile "/with space/kh" ~/kh2\n  GlobalKnownHostsFile none\n'
        )
    )
    assert (found.hostname, found.port, found.user) == ("10.0.0.gpu1", 2201, "train")
    assert found.identity_files == (f"{HOME}/a", "/k/train@gpu1")
    assert found.known_hosts == ("/with space/kh", f"{HOME}/kh2")


def test_comments_at_the_end_of_a_line(config):
    found = route(config("Port 2222 # x\nUser train # y\n"))
    assert (found.port, found.user) == (2222, "train")


def test_negated_pattern(config):
    assert route(config("Host gpu* !gpu9\n  User train\n"), "gpu9").user == getpass.getuser()


def test_target_wins_over_config(config):
    text = "Host gpu1\n HostName 10.0.0.1\n User a\n Port 1\n"
    found = route(config(text), address="10.9.9.9", user="b", port=2)
    assert (found.hostname, found.user, found.port) == ("10.9.9.9", "b", 2)
    assert route(config(text), address="fe80::1%eth0").hostname == "fe80::1%eth0"


def test_blocks_match_what_the_inventory_says(config):
    text = "Match host 10.9.9.9\n Port 7\nMatch user b\n IdentityFile /of-b\nMatch localuser nobody-else\n Port 9\n"
    found = route(config(text), address="10.9.9.9", user="b")
    assert found.port == 7 and found.identity_files == ("/of-b",)


@pytest.mark.parametrize(
    "text",
    [
        'Include "INC"\n',
        "Host gpu*\n  Include INC\n",
        "Match originalhost gpu1\n  User inner\n  Port 2222\n",
        'Match exec "test %h = gpu1"\n  User inner\n  Port 2222\n',
        "Match localuser ME\n  User inner\n  Port 2222\n",
        "Match final\n  User inner\n  Port 2222\n",
        "CanonicalizeHostname no\nMatch all\n  User inner\n  Port 2222\n",
    ],
)
def test_conditions_and_includes(config, text):
    inc = config("User inner\nPort 2222\n", "a b.conf").replace("a b", "a*")
    found = route(config(text.replace("INC", inc).replace("ME", getpass.getuser())))
    assert (found.user, found.port, found.hostname) == ("inner", 2222, "gpu1")


def test_an_include_of_another_host_s_block_says_nothing(config):
    inc = config("User inner\n", "inc.conf")
    assert route(config(f"Host other\n  Include {inc}\n")).user == getpass.getuser()


def test_canonical_names_are_looked_up_as_openssh_does(config):
    text = "CanonicalizeHostname yes\nCanonicalDomains example.invalid\nMatch canonical\n User c\n"
    assert route(config(text)).hostname == "gpu1"
    assert route(config(text + "CanonicalizeFallbackLocal yes\n")).user == "c"


def test_jumps_are_resolved_with_the_same_config(config):
    text = "Host gpu1\n ProxyJump a,root@b:2022\nHost a\n HostName 1.1.1.1\nHost b\n HostName 2.2.2.2\n User x\n"
    found = route(config(text + " ProxyJump never\n"))
    assert found.jump is not None and found.jump.jump is not None
    assert (found.jump.hostname, found.jump.port, found.jump.user) == ("2.2.2.2", 2022, "root")
    assert found.jump.jump.hostname == "1.1.1.1" and found.jump.jump.jump is None


@pytest.mark.parametrize(
    ("jump", "expected"),
    [("u@[::1]:44", ("u", "::1", 44)), ("ssh://u@h:44", ("u", "h", 44)), ("[::1]", (None, "::1", 22))],
)
def test_jumps_of_every_spelling(config, jump, expected):
    found = route(config(f"Host gpu1\n ProxyJump {jump}\n")).jump
    assert found is not None
    assert (found.user, found.hostname, found.port) == (expected[0] or getpass.getuser(), *expected[1:])


def test_proxyjump_none_and_order(config):
    assert route(config("Host gpu1\n ProxyJump none\nHost *\n ProxyJump b\n")).jump is None
    assert route(config("Host gpu1\n ProxyCommand none\nHost *\n ProxyCommand b\n")).proxy_command is None
    found = route(config("Host gpu1\n ProxyCommand nc %h %p\n ProxyJump b\n"))
    assert found.proxy_command == "nc gpu1 22" and found.jump is None
    found = route(config("Host gpu1\n ProxyJump b\nHost *\n ProxyCommand nc %h %p\n"))
    assert found.jump is not None and found.proxy_command is None


def test_the_tokens_of_a_proxy_command_are_expanded_once_and_the_rest_is_left_to_the_shell(config):
    found = route(config("HostName %%h-%h\nUser u\nPort 7\nProxyCommand a '%h' %n:%p %r %%h ${HOME} \"$X\" # | b\n"))
    assert found.hostname == "%h-gpu1"
    assert found.proxy_command == "a '%h-gpu1' gpu1:7 u %h ${HOME} \"$X\" # | b"


def test_jump_loop(config):
    with pytest.raises(BadInput, match="loop"):
        route(config("Host *\n ProxyJump b\n"))


def test_identity_agent(config, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/a.sock")
    monkeypatch.setenv("OTHER_SOCK", "/o.sock")
    assert route(config("")).identity_agent == "/a.sock"
    assert route(config("IdentityAgent none\n")).identity_agent is None
    assert route(config("IdentityAgent $OTHER_SOCK\n")).identity_agent == "/o.sock"
    assert route(config('IdentityAgent "~/b %%d-%r.sock"\nUser u\n')).identity_agent == f"{HOME}/b %d-u.sock"


def test_paths_with_spaces_tokens_and_variables(config, monkeypatch):
    monkeypatch.setenv("KEYS", "/the keys/%h")
    text = 'IdentityFile "/a b/%%h %h %d %u %i"\nIdentityFile ${KEYS}/%r\nUser u\nCertificateFile "~/c d-cert.pub"\n'
    found = route(config(text))
    assert found.identity_files == (f"/a b/%h gpu1 {HOME} {getpass.getuser()} {os.getuid()}", "/the keys/%h/u")
    assert found.certificate_files == (f"{HOME}/c d-cert.pub",)
    assert route(config("IdentityFile none\n")).identity_files == ()
    assert route(config("UserKnownHostsFile none\nGlobalKnownHostsFile none\n")).known_hosts == ()
    monkeypatch.delenv("KEYS")
    with pytest.raises(BadInput, match="KEYS"):
        route(config(text))


def test_several_known_hosts_files_with_spaces_and_tokens(config):
    text = 'UserKnownHostsFile "/a b/c d" /e%%/%k "~/f g"\nGlobalKnownHostsFile "/h i" /j\nHostKeyAlias al\n'
    assert route(config(text)).known_hosts == ("/a b/c d", "/e%/al", f"{HOME}/f g", "/h i", "/j")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "a\nb", "a\0b", "$(touch x)", "u@a", "ssh://a", ""])
def test_names_that_would_be_options_two_words_or_commands(config, name):
    with pytest.raises(BadInput):
        route(config(""), name)
    if "@" not in name and "/" not in name:
        for field in ("address", "user"):
            with pytest.raises(BadInput):
                route(config(""), **{field: name})


@pytest.mark.parametrize(
    "text",
    [
        "Port abc\n",
        "ProxyJump a b\n",
        "Host gpu1\n HostName\n",
        'IdentityFile "unclosed\nHost "x\n',
        "Bogus yes\n",
        "Include config\n",
        b'User \xff\xfe "\nB\x1b[31m\xff yes\n',
    ],
)
def test_wrong_values_are_refused_with_openssh_s_word_and_the_file(config, text):
    file = config(text.replace("Include config", "Include CONFIG") if isinstance(text, str) else text)
    Path(file).write_bytes(Path(file).read_bytes().replace(b"CONFIG", os.fsencode(file)))
    with pytest.raises(BadInput) as caught:
        route(file)
    said, hint = str(caught.value).removeprefix(f"{caught.value.host}: "), caught.value.hint or ""
    assert said.isprintable() and said.startswith(file) and "terminating" not in said, said
    assert not said.startswith(f"{file}: {file}"), "ssh has named the file"
    assert f"`ssh -F {file} -G HOST`" in hint, "the same for all hosts"


def test_values_that_are_not_utf_8_reach_the_route(config):
    assert (
        os.fsencode(route(config(b"IdentityFile /\xff\xfe\nHost \xff*\n Port 9\n")).identity_files[0]) == b"/\xff\xfe"
    )


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        route(str(tmp_path / "none"))


def test_a_proxy_that_hands_over_a_descriptor_is_refused(config):
    with pytest.raises(BadInput, match="ProxyUseFdpass"):
        route(config("ProxyCommand x\nProxyUseFdpass yes\n"))


def test_without_the_ssh_program_the_error_says_what_to_install(config, monkeypatch, tmp_path):
    file = config("")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="cannot run ssh") as caught:
        route(file)
    assert caught.value.hint is not None and "install the OpenSSH client" in caught.value.hint


def test_a_pipe_in_the_configuration_costs_its_time_once_for_all_hosts(config, tmp_path, monkeypatch):
    monkeypatch.setattr(openssh, "LIMIT_S", 0.3)
    os.mkfifo(tmp_path / "pipe")
    file = config(f"Include {tmp_path}/pip*\n")
    began_s = time.monotonic()
    found = resolve_all([Target(f"gpu{number}", ssh_config=file) for number in range(1000)])
    assert all("does not end" in str(error) for error in found.values())
    assert time.monotonic() - began_s < 60, "a thousand times 0.3 s would be 150 s at two at once"


def test_a_command_that_does_not_end_is_killed_with_ssh(config, tmp_path, monkeypatch):
    monkeypatch.setattr(openssh, "LIMIT_S", 1.0)
    pid = tmp_path / "pid"
    with pytest.raises(BadInput, match="does not end"):
        route(config(f'Match exec "echo $$ > {pid}; sleep 1000; true"\n User x\n'))
    until(lambda: not lives(int(pid.read_text())))


def lives(pid: int) -> bool:
    """Whether a process lives; one that nobody reaps does not."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.startswith(b"Z")


def test_a_directory_service_that_is_away_is_each_hosts_failure(config, monkeypatch):
    """`ssh -G` has answered before; the routes need this user's home as well."""
    target = Target("gpu1", ssh_config=config("IdentityFile ~/.ssh/own"))
    assert resolve(target).user

    def away(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    known = ssh_config.answers([target])
    monkeypatch.setattr(ssh_config, "answers", lambda _: known)
    monkeypatch.setattr(pwd, "getpwuid", away)
    (route,) = resolve_all([target]).values()
    assert isinstance(route, BadInput)
    assert f"uid {os.getuid()} has no account" in route.message
