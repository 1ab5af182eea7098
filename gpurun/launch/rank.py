"""The script that starts every rank, ``/gpurun/bin/rank``. Pure.

It contains the command of the rank: whatever starts it, such as ``horovodrun`` or a remote shell, reads none of the
command's words. If it is given words, these are the command: the launcher of an older gpurun gives them.

It exports the host's own settings, because a launcher sends rank 0's environment to every rank. It stays the parent of
the rank and leaves in the job's `run` folder what the agent reads (`gpurun.node.job.rank_processes`)::

    stop.ATTEMPT                         made by the agent: ranks that start later end at once
    ranks/ATTEMPT/RANK.PID.STARTED/      PID and STARTED are the script's own, as in its /proc/PID/stat
        start                            "started"; a folder without it is no rank
        o, e                             what the rank and its children print
        m                                the metrics that the rank reports, if it does (`gpurun.runtime`)
        told                             empty: the launcher's signal was passed on to the rank
        end.CODE                         empty: the rank has ended, 128 + n by signal n
        now                              the rank's present number, if `gpurun.runtime` knows that it has changed
    cgroup.ATTEMPT/                      what the kernel counted of the container when a rank failed

`horovodrun` (Gloo) signals the script alone, so the rank runs in the background and the script passes HUP, INT and TERM
on. `mpirun` signals the rank's process group, so the script passes nothing on. After the agent's notice, the script
passes nothing on either, so that no rank gets a signal twice. If gpurun starts the ranks, only the agent signals them.

These two kill the other ranks when one has ended: `mpirun` after 2 s, `horovodrun` after 5 s. So the script of a rank
that ends after the agent's notice stays until the grace is over. The script of a failed rank first waits for that
notice. The launcher takes such a rank for running; the agent does not (docs/decisions/0021-launchers-learn-late.md).

What a rank prints goes through pipes: a program that opens ``/dev/stdout`` anew would empty a file.
The end is a name without content, so that it is whole or absent and a full disk can hold it. Where the folder cannot be
written the rank starts all the same, prints where it would have printed, and nothing is known of it.

What a rank left behind gets SIGTERM, too: below a shell that has ended, this is the program. Those that read what
others of them print, such as `tee`, get it after them: the program's last words, and its save, would break with the
pipe.

It is POSIX sh for dash, bash and busybox, and needs mkdir, but no python3. Its variables begin with ``gpurun_``: to
assign a name that the environment has would change the rank's environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpurun.jobs.spec import quoted
from gpurun.launch.fabric import Setting

if TYPE_CHECKING:
    from gpurun.launch.launchers.launcher import Launcher

RANK_SCRIPT = "/gpurun/bin/rank"
"""Where `rank_script` lies in the container."""
COPIED_S = 5.0
"""How long a script outlives its processes for their output's sake: a disk may be full, or a daemon hold the pipe."""
NOTICE_S = 3.0
"""How long the script of a failed rank waits for the agent's notice. The supervisor names the rank within 2 s."""

_START = """\
gpurun_folder=
gpurun_clock() {  # as gpurun_now, in hundredths of a second
  read -r gpurun_now gpurun_file </proc/uptime
  gpurun_now=${gpurun_now%.*}${gpurun_now#*.}
}
gpurun_leave() {  # gpurun_leave CODE ENDED: exits, but not before the launcher may know that the rank has ended
  [ -z "$gpurun_known" ] || exit "$1"  # it ends all ranks already
  [ "$1" != 0 ] || gpurun_notice=0
  unset "$gpurun_variable"  # what stays is no rank
  exec sh -c '
    while read -r now rest </proc/uptime; do
      [ ! -e "$0" ] || set -- "$1" "$3" "$3"
      [ "${now%.*}${now#*.}" -lt "$2" ] || exit "$1"
      sleep 0.1 || sleep 1
    done
    exit "$1"
  ' "$GPURUN_RUN/stop.$GPURUN_ATTEMPT" "$1" $(($2 + gpurun_notice)) $(($2 + gpurun_grace)) 2>/dev/null
}
gpurun_begin() {  # makes the rank's folder; fails where it cannot be written
  case $gpurun_rank in '' | *[!0-9]*) return 1 ;; esac
  [ "${GPURUN_RUN:-}" ] && read -r gpurun_stat </proc/$$/stat || return 1
  set -- ${gpurun_stat##*)}
  gpurun_folder=$GPURUN_RUN/ranks/$GPURUN_ATTEMPT/$gpurun_rank.$$.${20}
  mkdir -p "${gpurun_folder%/*}" && mkdir "$gpurun_folder" || return 1
  true >>"$gpurun_folder/o" && true >>"$gpurun_folder/e" && echo started >"$gpurun_folder/start"
}
eval "gpurun_rank=\\${$gpurun_variable:-}"
if ! gpurun_begin 2>/dev/null; then
  [ -z "$gpurun_folder" ] || rm -rf "$gpurun_folder" 2>/dev/null
  gpurun_folder=
fi
if [ -e "${GPURUN_RUN:-}/stop.${GPURUN_ATTEMPT:-}" ]; then
  [ "$gpurun_folder" ] && true >"$gpurun_folder/end.143"
  gpurun_clock
  gpurun_leave 143 "$gpurun_now"
fi
[ "$gpurun_folder" ] || exec "$@"
"""

_RUN = """\
exec 7>&2 2>/dev/null  # the shell would tell the launcher which signal ended the rank
[ -e /proc/$$/fd/0 ] || exec </dev/null
# The script outlives a signal to the whole process group; in the rank these signals do what they always do.
gpurun_survive() {
  trap : QUIT ALRM USR1 USR2
  trap 'gpurun_known=1' HUP INT TERM
}
gpurun_survive
gpurun_launcher=${GPURUN_STDIN:-}
unset GPURUN_STDIN
gpurun_run() {  # in the background a shell makes the rank ignore INT and QUIT: fails if nothing undoes that
  trap - INT QUIT  # enough for bash
  while read -r gpurun_word gpurun_mask && [ "$gpurun_word" != SigIgn: ]; do :; done </proc/self/status
  case $gpurun_mask in *[0189]) exec "$@" ;; esac
  if env --default-signal=INT,QUIT true 2>/dev/null; then
    exec env --default-signal=INT,QUIT sh -c 'exec "$@"' sh "$@"
  fi
  set -- sh -c 'exec 2>&9 9>&-; exec "$@"' sh "$@"  # perl itself may complain of the locale
  exec perl -e '$SIG{INT} = $SIG{QUIT} = "DEFAULT"; exec @ARGV' "$@" 9>&2 2>/dev/null
}
gpurun_pass() {  # gpurun_pass SIGNAL: to the rank, unless the agent tells it
  gpurun_known=1
  if [ -z "$gpurun_main" ]; then
    gpurun_early=$1
  elif [ -e "/proc/$gpurun_main" ]; then
    gpurun_hit=1
    [ -e "$GPURUN_RUN/stop.$GPURUN_ATTEMPT" ] && return
    true >"$gpurun_folder/told"
    kill -s "$1" "$gpurun_main"
  fi
}
gpurun_lives() {  # whether the rank has not ended; a shell may not know it yet
  read -r gpurun_stat <"/proc/$gpurun_main/stat" || return
  case ${gpurun_stat##*)} in ' Z'* | ' X'*) return 1 ;; esac
}
gpurun_wait() {  # for the rank's end; a signal interrupts `wait`
  wait "$gpurun_main"
  gpurun_code=$?
  [ "$gpurun_hit" ] || return
  while gpurun_lives; do sleep 0.05 || sleep 1; done  # bash can lose an end that comes together with a signal
  wait "$gpurun_main"
  gpurun_code=$?
}
gpurun_listen() {  # to the job's ssh: when that is gone, so is the launcher
  unset "$gpurun_variable"
  trap '' HUP INT QUIT ALRM TERM USR1 USR2
  exec sh -c 'read -r word && [ "$word" = gpurun ] && cat && kill -s TERM "$0"' $$ >/dev/null 3<&- 4>&- 5<&- 6>&-
}
gpurun_copy() {  # from a pipe to a file, as a process that is no rank; where the disk is full it tries again
  unset "$gpurun_variable"
  exec sh -c 'until cat >>"$0"; do sleep 1; done' "$gpurun_folder/$1" >/dev/null 3<&- 4>&- 5<&- 6>&-
}
gpurun_last_words() {  # gpurun_last_words TWENTIETHS: waits for the copies, which end with the last writer
  while [ $1 -gt 0 ] && { kill -0 $gpurun_out || kill -0 $gpurun_err; }; do
    set -- $(($1 - 1))
    sleep 0.05 || sleep 1
  done
}
gpurun_pipe() {  # as fd 3 to read and 4 to write; opened for both at first: who opens one end alone waits for the other
  mkfifo "$gpurun_folder/pipe" && exec 8<>"$gpurun_folder/pipe" 3<"$gpurun_folder/pipe" 4>"$gpurun_folder/pipe" 8>&- &&
    rm "$gpurun_folder/pipe"
}
gpurun_count() {  # keeps what the kernel counted of the container: its control group goes with it
  mkdir -p "$GPURUN_RUN/cgroup.$GPURUN_ATTEMPT" || return
  for gpurun_file in events peak current max; do gpurun_keep memory.$gpurun_file; done
  for gpurun_file in oom_control max_usage_in_bytes limit_in_bytes; do
    gpurun_keep memory/memory.$gpurun_file
  done
  for gpurun_file in pids.events pids.max pids/pids.events pids/pids.max; do gpurun_keep $gpurun_file; done
}
gpurun_keep() {  # gpurun_keep NAME: a file of cgroup v2, or FOLDER/NAME of v1
  [ ! -r "/sys/fs/cgroup/$1" ] || cat "/sys/fs/cgroup/$1" >"$GPURUN_RUN/cgroup.$GPURUN_ATTEMPT/${1##*/}"
}
gpurun_id=$GPURUN_JOB/$GPURUN_ATTEMPT/${gpurun_folder##*/}
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"
if ! gpurun_pipe || ! exec 5<&3 6>&4 3<&- 4>&- || ! gpurun_pipe; then
  rm -rf "$gpurun_folder"  # for example without mkfifo: it prints to the launcher, and cannot report
  exec "$@" 2>&7 7>&- 3<&- 4>&- 5<&- 6>&-
fi
exec 7>&-
trap '' HUP INT QUIT ALRM TERM USR1 USR2  # the copies ignore from their first moment what the process group is told
gpurun_copy o <&5 &
gpurun_out=$!
gpurun_copy e <&3 &
gpurun_err=$!
gpurun_survive
exec 3<&- 5<&-
gpurun_main= gpurun_early= gpurun_hit= gpurun_ear=
if [ "$gpurun_alone" ] && { gpurun_run true & wait $!; }; then
  trap 'gpurun_pass HUP' HUP
  trap 'gpurun_pass INT' INT
  trap 'gpurun_pass TERM' TERM
  exec 8<&0
  if [ "$gpurun_launcher" ]; then
    gpurun_listen <&8 &
    gpurun_ear=$!
    exec 8</dev/null
  fi
  export GPURUN_RANK_ID="$gpurun_id"
  gpurun_run "$@" <&8 >&6 2>&4 4>&- 6>&- 8<&- &
  gpurun_main=$!
  unset GPURUN_RANK_ID  # what the script starts is no rank
  [ -z "$gpurun_early" ] || gpurun_pass "$gpurun_early"
  exec 8<&-
  gpurun_wait
  [ -z "$gpurun_ear" ] || kill -s KILL $gpurun_ear
else
  export GPURUN_RANK_ID="$gpurun_id"
  (exec "$@" 4>&- 6>&-) >&6 2>&4
  gpurun_code=$?
fi
exec 4>&- 6>&-
unset GPURUN_RANK_ID
gpurun_last_words 4  # something that lives on may keep the pipes
[ "$gpurun_code" = 0 ] || gpurun_count
true >"$gpurun_folder/end.$gpurun_code"
gpurun_clock
gpurun_ended=$gpurun_now
"""

_SWEEP = """\
gpurun_left() {  # the processes that the rank left behind, by the variable that only they have
  if printf 'a\\0b\\0' | grep -qxz b; then
    grep -lsxzF "GPURUN_RANK_ID=$gpurun_id" /proc/[0-9]*/environ
  else
    for gpurun_file in /proc/[0-9]*/environ; do
      tr '\\0' '\\n' <"$gpurun_file" | grep -qxF "GPURUN_RANK_ID=$gpurun_id" && echo "$gpurun_file"
    done
  fi
}
gpurun_find() {  # their pids; 1 if there are none
  gpurun_pids=
  for gpurun_file in $(gpurun_left); do
    gpurun_file=${gpurun_file#/proc/}
    gpurun_pids="$gpurun_pids ${gpurun_file%/environ}"
  done
  [ "$gpurun_pids" ]
}
gpurun_fed() {  # gpurun_fed PID: whether another of them prints into its stdin, as in `train | tee log`
  gpurun_pipe=$(ls -l "/proc/$1/fd/0")
  case $gpurun_pipe in *' pipe:['*']') gpurun_pipe=${gpurun_pipe##* } ;; *) return 1 ;; esac
  gpurun_printing=
  for gpurun_pid in $gpurun_pids; do
    [ "$gpurun_pid" = "$1" ] || gpurun_printing="$gpurun_printing /proc/$gpurun_pid/fd/1 /proc/$gpurun_pid/fd/2"
  done
  [ "$gpurun_printing" ] || return
  case $(ls -l $gpurun_printing) in *" $gpurun_pipe"*) ;; *) return 1 ;; esac
}
gpurun_notify() {  # SIGTERM to each, once; to one that reads what others print a second after they have ended
  for gpurun_one in $gpurun_pids; do
    case $gpurun_told in *" $gpurun_one "*) continue ;; esac
    if gpurun_fed "$gpurun_one"; then
      gpurun_readers="$gpurun_readers $gpurun_one " gpurun_fed_until=$((gpurun_now + 100))
      continue
    fi
    case $gpurun_readers in *" $gpurun_one "*) [ "$gpurun_now" -ge "$gpurun_fed_until" ] || continue ;; esac
    gpurun_told="$gpurun_told $gpurun_one "
    kill -s TERM "$gpurun_one"
  done
  if [ -z "$gpurun_told" ]; then  # they read from each other
    gpurun_told=" $gpurun_pids "
    kill -s TERM $gpurun_pids
  fi
}
gpurun_sweep() {
  gpurun_told= gpurun_readers= gpurun_fed_until=0
  gpurun_deadline=$((gpurun_ended + gpurun_grace))
  while gpurun_find && [ "$gpurun_now" -lt $((gpurun_deadline + 500)) ]; do
    if [ "$gpurun_told" ] && [ "$gpurun_now" -ge "$gpurun_deadline" ]; then
      kill -s KILL $gpurun_pids
    else
      gpurun_notify
    fi
    sleep 0.1 || sleep 1
    gpurun_clock
  done
}
gpurun_sweep
gpurun_last_words $gpurun_copied_twentieths  # nobody is left to print: all is copied unless the disk is full
gpurun_leave "$gpurun_code" "$gpurun_ended"
"""


def rank_script(
    environment: Iterable[Setting],
    launcher: Launcher,
    command: Sequence[str] = (),
    *,
    grace_s: float,
    notice_s: float = NOTICE_S,
    copied_s: float = COPIED_S,
) -> str:
    """Return the script's text for one host.

    Args:
        environment: the host's settings; values may contain anything except NUL.
        launcher: what runs the script: the variable with the rank's number, and the receiver of its signals.
        command: the argv of the rank, if the script is given none (`gpurun.jobs.spec`).
        grace_s: time between SIGTERM and SIGKILL, for ranks and for processes that a rank left behind.
        notice_s: how long a failed rank's script waits for the agent's notice; 0 if others continue without the rank.
        copied_s: how long the script then waits for the copy of their output.
    """
    exports = "".join(f"export {setting.name}={shlex.quote(setting.value)}\n" for setting in environment)
    limits = f"gpurun_grace={max(0, round(100 * grace_s))} gpurun_notice={round(100 * notice_s)} "
    limits += f"gpurun_copied_twentieths={round(20 * copied_s)}\n"
    limits += f"gpurun_variable={launcher.rank_variable} gpurun_alone={'' if launcher.tells == 'group' else 1} "
    limits += f"gpurun_known={1 if launcher.tells == 'nobody' else ''}\n"
    words = f"[ $# != 0 ] || set -- {' '.join(map(quoted, command))}\n" if command else ""
    return f"#!/bin/sh\n{words}{exports}{limits}{_START}{_RUN}{_SWEEP}"
