import base64
import hashlib
import hmac
import subprocess

import pytest

from gpurun.remote import known_hosts

KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + b"k" * 32).decode()
OTHER = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + b"o" * 32).decode()


def find(text, host, port=22, alias=None):
    return known_hosts.find_entries(known_hosts.parse_known_hosts(text, "kh"), host, port, alias)


def hashed(name):
    salt = b"s" * 20
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "host", "port", "found"),
    [
        ("gpu1", "gpu1", 22, True),
        ("gpu1", "GPU1", 22, True),
        ("gpu1,10.0.0.1", "10.0.0.1", 22, True),
        ("gpu1", "gpu11", 22, False),
        ("gpu?", "gpu7", 22, True),
        ("gpu*", "gpu-r1-01", 22, True),
        ("gpu*,!gpu-bad", "gpu-bad", 22, False),
        ("[gpu1]:2222", "gpu1", 2222, True),
        ("[gpu1]:2222", "gpu1", 22, False),
        ("[gpu1]:2222", "gpu1", 2223, False),
        ("gpu1", "gpu1", 2222, True),  # OpenSSH falls back to the name without the port
        ("[gpu*]:2222", "gpu9", 2222, True),
        (hashed("gpu1"), "gpu1", 22, True),
        (hashed("gpu1"), "gpu2", 22, False),
        (hashed("[gpu1]:2222"), "gpu1", 2222, True),
        ("|1|broken", "gpu1", 22, False),
        ("|1|%%%|%%%", "gpu1", 22, False),
    ],
)
def test_names(names, host, port, found):
    assert bool(find(f"# comment\n\n{names} ssh-ed25519 {KEY} me@here\n", host, port)) is found


@pytest.mark.parametrize(
    ("text", "certified"),
    [
        (f"@cert-authority *.example.com,gpu* ssh-ed25519 {OTHER}\n", True),
        (f"@cert-authority * ssh-ed25519 {OTHER}\n@revoked * ssh-ed25519 {OTHER}\n", True),
        (f"@cert-authority * ssh-ed25519 {OTHER}\ngpu1 ssh-ed25519 {KEY}\n", False),
        (f"@cert-authority *.example.com ssh-ed25519 {OTHER}\n", False),
        (f"@cert-authority *,!gpu1 ssh-ed25519 {OTHER}\n", False),
        (f"@revoked * ssh-ed25519 {OTHER}\n", False),
        ("@cert-authority\n@cert-authority gpu1 ssh-ed25519 x\n", False),
        ("", False),
    ],
)
def test_a_host_for_which_only_an_authority_vouches(text, certified):
    assert known_hosts.is_certified(known_hosts.parse_known_hosts(text, "kh"), "gpu1", 22) is certified


def test_line_numbers_and_what_cannot_be_read():
    unreadable = "\x00garbage\ngpu1 ssh-ed25519\ngpu1 ssh-ed25519 not*base64\n"
    text = f"{unreadable}@cert-authority gpu1 ssh-ed25519 {OTHER}\ngpu1 ssh-ed25519 {KEY}\n"
    (entry,) = find(text, "gpu1")
    assert entry.where == "kh:5"
    assert entry.blob == base64.b64decode(KEY)


def test_revoked_keys_come_with_the_others():
    entries = find(f"@revoked * ssh-ed25519 {OTHER}\ngpu1 ssh-ed25519 {KEY}\n", "gpu1")
    assert [entry.marker for entry in entries] == ["@revoked", ""]


def test_alias_wins_and_has_no_port():
    text = f"alias ssh-ed25519 {KEY}\n[gpu1]:2222 ssh-ed25519 {OTHER}\n"
    (entry,) = find(text, "gpu1", 2222, "Alias")
    assert entry.blob == base64.b64decode(KEY)


def test_fingerprint_is_ssh_keygens(tmp_path):
    file = tmp_path / "k.pub"
    file.write_text(f"ssh-ed25519 {KEY} x\n")
    printed = subprocess.run(["ssh-keygen", "-lf", str(file)], capture_output=True, text=True, check=True).stdout
    assert known_hosts.fingerprint(base64.b64decode(KEY)) == printed.split()[1]


def test_a_file_that_is_not_there_has_no_entries(tmp_path):
    assert known_hosts.load_known_hosts([str(tmp_path / "none"), str(tmp_path)]) == ()


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "kh"
    file.write_text(f"gpu1 ssh-ed25519 {KEY}\n")
    assert len(known_hosts.load_known_hosts([str(file)])) == 1
    file.write_text(f"gpu1 ssh-ed25519 {KEY}\ngpu2 ssh-ed25519 {KEY}\n")
    assert len(known_hosts.load_known_hosts([str(file)])) == 2
