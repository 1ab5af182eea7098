"""What the head's pip is told, passed on without its passwords being told to anybody else."""

from __future__ import annotations

import configparser

import pytest

from gpurun.content import environment
from gpurun.content.environment import PipSettings, secrets_of, users_settings, with_folder, with_index
from gpurun.errors import BadInput


def test_later_files_win_and_variables_win_over_files(write, tmp_path):
    write({
        "etc/pip.conf": "[global]\nindex-url = https://a.example/simple\ntimeout = 5\n[freeze]\ntimeout = 9\n",
        "home/pip.conf": "[global]\nextra-index-url =\n    https://b.example/simple\n    https://c.example/simple\n"
        "[install]\nfind_links = /wheels\n",
    })  # fmt: skip
    files = [tmp_path / "etc/pip.conf", tmp_path / "home/pip.conf", tmp_path / "missing"]
    found = users_settings({"PIP_INDEX_URL": "https://d.example/simple", "PIP_DEFAULT_TIMEOUT": "60"}, files)
    assert found.values == {
        "index-url": ("https://d.example/simple",), "timeout": ("60",), "find-links": ("/wheels",),
        "extra-index-url": ("https://b.example/simple", "https://c.example/simple"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "no section\n", "[global\n", "[global]\nindex-url\n", b"\xff\xfe\x00", "[global]\n%(x)s = %\n"]
)
def test_a_damaged_file_says_nothing(write, text):
    assert users_settings({}, [write({"pip.conf": text})]).values == {}


def test_pips_own_places_are_read_in_its_order(write, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "OF_THE_MACHINE", tmp_path / "etc/pip.conf")  # this machine may have one
    write({
        "etc/pip.conf": "[global]\nretries = 3\n",
        "xdg/pip/pip.conf": "[global]\nretries = 1\ntimeout = 1\n", "user/pip/pip.conf": "[global]\ntimeout = 2\n",
        "named.conf": "[global]\nproxy = http://p:1\n",
    })  # fmt: skip
    environ = {
        "XDG_CONFIG_DIRS": str(tmp_path / "xdg"), "XDG_CONFIG_HOME": str(tmp_path / "user"), "HOME": str(tmp_path)
    }  # fmt: skip
    found = users_settings(environ).values
    assert (found["retries"], found["timeout"]) == (("3",), ("2",))
    found = users_settings({**environ, "PIP_CONFIG_FILE": str(tmp_path / "named.conf")}).values
    assert (found["timeout"], found["proxy"]) == (("1",), ("http://p:1",))
    assert users_settings({**environ, "PIP_CONFIG_FILE": "/dev/null"}).values == {}


def test_a_proxy_of_the_environment_is_passed_on():
    assert users_settings({"https_proxy": "http://p:8080"}, []).values == {"proxy": ("http://p:8080",)}


def test_passwords_make_no_other_environment_and_are_known_as_secrets():
    one = PipSettings({"index-url": ("https://me:s3cret%21@a.example/simple",), "proxy": ("http://u:pr0xy@p",)})
    other = PipSettings({"index-url": ("https://a.example/simple",)})
    assert one.named == other.named == {"index-url": ["https://a.example/simple"]}
    assert set(one.secrets) == {"s3cret%21", "s3cret!", "pr0xy"} and other.secrets == ()
    assert PipSettings({"index-url": ("https://t0ken@a.example/simple",)}).secrets == ("t0ken",)


MALFORMED = (
    "https://me:s3cret@[::1/simple", "https://me:s3cret@a]b/simple", "http://me:s3cret@a.example:port/simple",
    "http://me:s3/cret@a.example/simple", "http://me:s3cret@a\u2100.example/simple", "file://[s3cret",
)  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
@pytest.mark.parametrize("key", ["index-url", "extra-index-url", "find-links", "proxy"])
def test_a_url_that_cannot_be_read_is_an_error_that_does_not_repeat_it(key, url):
    with pytest.raises(BadInput, match=f"cannot read the URL in pip's setting {key}") as caught:
        PipSettings({"timeout": ("5",), key: ("https://b.example", url)}).check()
    assert "cret" not in f"{caught.value} {caught.value.hint}" and caught.value.__suppress_context__


def test_urls_and_folders_that_pip_takes_are_taken():
    PipSettings({
        "index-url": ("https://me:a%2Fb@[::1]:8080/simple",), "find-links": ("/a [b", "file:///w", "wheels", "https://a"),
        "proxy": ("me:x@p:3128",), "trusted-host": ("a.example:80", "[::1]"), "cert": ("/a]b",),
    }).check()  # fmt: skip


def test_a_password_in_a_proxy_without_a_scheme_is_a_secret_too():
    assert PipSettings({"proxy": ("me:pr0xy@p:3128",)}).secrets == ("pr0xy",)


def test_an_index_of_the_recipe_is_the_only_one_and_a_folder_needs_no_network():
    users = PipSettings({
        "index-url": ("https://me:x@a.example",), "extra-index-url": ("https://b.example",), "find-links": ("/w",),
        "cert": ("/c.pem",), "proxy": ("http://p",),
    })  # fmt: skip
    assert with_index(users, "https://n.example").values == {
        "index-url": ("https://n.example",), "cert": ("/c.pem",), "proxy": ("http://p",)
    }  # fmt: skip
    assert with_folder("/wheels").is_offline and not users.is_offline


def test_the_file_says_the_same(write):
    settings = PipSettings({"extra-index-url": ("https://a.example/%20x", "file:///b"), "index-url": ("https://c",)})
    path = write({"pip.conf": settings.as_file()})
    assert users_settings({}, [path]) == settings
    configparser.RawConfigParser().read(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("machine a login me password s3cret\n", ("s3cret",)),
        ("machine a\n  login me\n  password s3cret\nmachine b password other", ("s3cret", "other")),
        ('default password "quoted"', ("quoted",)),
        ("password", ()), ("", ()), (b"\xff password x\xff", ("x\ufffd",)),
    ],
)  # fmt: skip
def test_passwords_of_a_netrc_are_known_however_it_is_laid_out(write, text, found):
    assert secrets_of(write({"netrc": text})) == found
    assert secrets_of(None) == ()
