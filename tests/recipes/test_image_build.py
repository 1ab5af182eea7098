import os
import shutil
import tarfile

import pytest
import rootfs
import wheelhouse

FRAMEWORKS = {"tf2.15", "torch", "jax"}
BOOKWORM = {"ID": "debian", "VERSION_CODENAME": "bookworm"}


def test_package_lists_may_have_comments_and_blank_lines(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("# why\n\nopenmpi-bin  # launcher\n  openssh-client\n")
    assert rootfs.package_list(file) == ("openmpi-bin", "openssh-client")


def test_the_image_is_made_from_the_mirror_the_machine_uses():
    targets = ["http://mirror.example/debian/|bookworm|main", "http://mirror.example/debian/|bookworm|contrib",
               "http://mirror.example/debian/|bookworm-updates|main", "http://security.example/|bookworm-security|main",
               "https://vendor.example/apt/|stable|main"]  # fmt: skip
    assert rootfs.sources(BOOKWORM, targets) == (
        "deb http://mirror.example/debian/ bookworm main",
        "deb http://mirror.example/debian/ bookworm-updates main",
        "deb http://security.example/ bookworm-security main",
    )


def test_a_newer_debian_serves_bookworm_from_the_same_mirror():
    release = {"ID": "debian", "VERSION_CODENAME": "trixie"}
    assert rootfs.sources(release, ["http://mirror.example/debian/|trixie|main"]) == (
        "deb http://mirror.example/debian/ bookworm main",
    )


@pytest.mark.parametrize("release", [{"ID": "ubuntu", "VERSION_CODENAME": "noble"}, {}])
def test_another_distribution_leaves_the_mirror_to_mmdebstrap(release):
    assert rootfs.sources(release, ["http://archive.example/ubuntu/|noble|main"]) == ()


def test_only_settings_for_reaching_mirrors_are_taken_over():
    dump = ['Acquire "";\n', 'Acquire::http "";\n', 'Acquire::http::Proxy "http://proxy.example:3128";\n',
            'Acquire::Check-Valid-Until "false";\n', 'Acquire::Languages "none";\n',
            'DPkg::Post-Invoke:: "rm -f /";\n']  # fmt: skip
    assert rootfs.apt_settings(dump) == (
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::Check-Valid-Until "false";',
    )


def test_a_layer_holds_what_changed_and_nothing_else_whatever_it_is_called(tmp_path):
    tree = tmp_path / "tree"
    for folder in ("etc", "usr/lib", "var/log", "var/cache/apt", "proc"):
        (tree / folder).mkdir(parents=True)
    (tree / "etc/old").write_text("old")
    (tree / "usr/lib/kept").write_text("as it was")
    start_ns = rootfs._clock_of(tree)
    odd = "new\n'; touch x #\u00e9"
    (tree / "etc" / odd).write_text("new")
    (tree / "etc/old").write_text("changed")
    (tree / "usr/lib/old mtime").write_text("unpacked")
    os.utime(tree / "usr/lib/old mtime", (1, 1))  # as dpkg does
    (tree / "etc/link").symlink_to("/nowhere")
    (tree / "var/log/apt.log").write_text("noise")
    (tree / "var/cache/apt/x.deb").write_text("noise")
    tar = tmp_path / "layer.tar"
    rootfs._archive(tree, tar, rootfs._changed_since(tree, start_ns))
    with tarfile.open(tar) as archive:
        names = {member.name for member in archive if not member.isdir()}
    assert names == {f"etc/{odd}", "etc/old", "etc/link", "usr/lib/old mtime"}


def test_a_whole_root_file_system_has_its_empty_folders_but_not_the_machines_settings(tmp_path):
    tree = tmp_path / "tree"
    for folder in ("proc/1", "tmp/x", "etc/apt/apt.conf.d"):
        (tree / folder).mkdir(parents=True)
    (tree / "etc/apt/apt.conf.d/99mmdebstrap").write_text('Acquire::http::Proxy "http://user:secret@proxy.example";')
    (tree / "etc/resolv.conf").write_text("nameserver 192.0.2.1")
    assert rootfs._changed_since(tree, 0) == ["etc", "etc/apt", "etc/apt/apt.conf.d", "proc", "tmp"]


def test_the_digest_knows_names_and_bounds(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("xy")
    second.write_text("z")
    before = wheelhouse.digest(first, second)
    assert before == wheelhouse.digest(first, second)
    assert before != wheelhouse.digest(second, first)
    first.write_text("x")
    second.write_text("yz")
    assert before != wheelhouse.digest(first, second)


def test_a_download_that_fails_leaves_no_folder_that_looks_complete(tmp_path):
    requirements = tmp_path / "nothing.txt"
    requirements.write_text("no-such-file==1 --hash=sha256:" + "0" * 64 + "\n")
    cache = tmp_path / "cache"
    with pytest.raises(wheelhouse.subprocess.CalledProcessError):
        wheelhouse.fetch(requirements, cache, ("--no-index", "--only-binary=:all:"))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "others"),
    [("base/debian-data.txt", {*FRAMEWORKS, "base", "shell", "tiny"}), ("base/install.py", FRAMEWORKS),
     ("tiny/ring.py", {"tiny"}),
     ("tf2.15/tensorflow.txt", {"tf2.15"}), ("tf2.15/Dockerfile", {"tf2.15"}), ("torch/torch.txt", {"torch"}),
     ("torch/Dockerfile.wheel", {"torch"}), ("torch/horovod.txt", {"torch"}),
     ("base/debian-compilers.txt", {*FRAMEWORKS, "base", "shell", "tiny"}), ("jax/jax.txt", {"jax"}),
     ("jax/Dockerfile", {"jax"})],
)  # fmt: skip
def test_a_changed_input_means_another_image_for_those_that_are_made_from_it(
    build, monkeypatch, tmp_path, changed, others
):
    before = {name: build.inputs_of(name) for name in build.IMAGES}
    shutil.copytree(build.HERE, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "BASE", tmp_path / "base")
    assert {name: build.inputs_of(name) for name in build.IMAGES} == before
    with (tmp_path / changed).open("a") as file:
        file.write("# hello\n")
    assert {name for name in build.IMAGES if build.inputs_of(name) != before[name]} == others


def test_readmes_say_python_and_images_that_train_have_it_in_a_layer_above_all_large_ones(build):
    texts = [(build.HERE / name / "Dockerfile").read_text() for name in FRAMEWORKS]
    assert all('RUN ["ln", "-s", "python3", "/usr/bin/python"]' in text[text.rindex("COPY") :] for text in texts)


def test_a_file_is_placed_in_a_build_context_under_another_name(build, tmp_path):
    source = tmp_path / "pip-26 'x'.whl"
    source.write_text("wheel")
    build.place(source, tmp_path / "context" / "wheels", "pip.whl")
    assert (tmp_path / "context/wheels/pip.whl").read_text() == "wheel"


class Engine:
    """Labels of the images that an engine holds, as `build` asks for them and makes them."""

    def __init__(self, host):
        self.labels = {}
        self.built = []

    def label(self, image, name):
        return self.labels.get(image, {}).get(name, "")


@pytest.fixture
def machine(build, monkeypatch, tmp_path):
    """A cache and an engine, both empty, on which `main` builds in no time."""
    engine = Engine("")

    def label(name, layers):
        engine.built.append(name)
        engine.labels[build.IMAGE[name]] = {
            build.INPUTS: build.inputs_of(name),
            build.LAYERS: (layers / "id").read_text(),
        }

    def tars(base, additions, into):
        for name in ("base", "shell", "tiny", *additions):
            (into / f"{name}.tar").write_text(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "engine_host", lambda: "")
    monkeypatch.setattr(build, "Engine", lambda host: engine)
    monkeypatch.setattr(rootfs, "build", tars)
    monkeypatch.setattr(build, "import_root", lambda name, engine, layers: label(name, layers))
    monkeypatch.setattr(build, "build_train", lambda name, engine, cache: label(name, build.base_image(engine, cache)))

    def run(*argv):
        engine.built.clear()
        monkeypatch.setattr("sys.argv", ["build.py", *argv])
        build.main()
        return sorted(engine.built)

    return run, engine, build.Cache(tmp_path / "gpurun")


def test_all_images_share_one_bootstrap_and_nothing_is_built_twice(build, machine):
    run, engine, cache = machine
    assert run() == sorted(build.IMAGES)
    assert {labels[build.LAYERS] for labels in engine.labels.values()} == {cache.bootstrap}
    assert run() == []


def test_images_of_an_older_bootstrap_are_built_again_beside_one_that_needs_a_new_one(build, machine):
    run, engine, cache = machine
    run("tf2.15", "base", "tiny")
    (cache.layers() / "compilers.tar").unlink()  # as caches of an older version lacked it
    assert run("tf2.15", "base") == []
    assert run() == sorted(build.IMAGES)
    assert {labels[build.LAYERS] for labels in engine.labels.values()} == {cache.bootstrap}


def test_an_image_that_was_left_on_an_older_bootstrap_is_built_when_it_is_named(build, machine):
    run, _engine, cache = machine
    run("tf2.15")
    (cache.layers() / "id").unlink()
    assert run("torch") == ["base", "torch"]
    assert run("tf2.15") == ["tf2.15"]


def test_engines_with_all_images_need_no_layers(machine):
    run, _engine, cache = machine
    run()
    shutil.rmtree(cache.folder)
    assert run() == []
    assert not (cache.folder / "images").exists()
