#!/usr/bin/env bash
# What one TPU worker does for launch/tpu.sh, which copies the repository to ~/spade_jax and calls this over ssh:
#     worker.sh install
#     worker.sh start RUN_DIR CACHE_DIR CONFIG [--section.field value ...]     start or resume, and return at once
#     worker.sh status | stop | tail | follow LINES
# Each answers with one line for the launcher, "spade-jax-worker INDEX ...". A run goes on when the connection ends.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"
state="$HOME/.spade_jax" # log, pid and exit status of the newest run; the lock is held while it goes on
log="$state/log"
mkdir -p "$state"
METADATA=http://metadata.google.internal/computeMetadata/v1 # what a machine is told of itself
index=${HOSTNAME##*-w-}
[[ $index =~ ^[0-9]+$ ]] || index=0
export PATH="$HOME/.local/bin:$PATH"

answer() { printf 'spade-jax-worker %s %s\n' "$index" "$*"; }

is_running() { ! (flock -n 8) 8>"$state/lock"; }

install_all() {
    if ! command -v uv >/dev/null 2>&1 && ! find_python >/dev/null; then
        say "worker $index: no Python from 3.11 on; uv will fetch one"
        python3 -m pip install --quiet --user --disable-pip-version-check uv ||
            fail "worker $index: uv could not be installed; its message is above"
    fi
    ensure_venv "$root/.venv" tpu,gcs
    answer installed
}

start() {
    if is_running; then
        answer started before
        return
    fi
    rm -f "$state/exit" "$state/pid"
    # Away from the terminal and from ssh, with nothing of theirs open.
    setsid bash "$root/launch/worker.sh" supervise "$@" </dev/null >>"$log" 2>&1 &
    local _
    for _ in $(seq 50); do
        [ ! -e "$state/pid" ] || break
        sleep 0.1
    done
    [ -e "$state/pid" ] || fail "worker $index: the run could not be started; see $log"
    answer started
}

# Holds the lock as long as the run is there, and keeps its exit status.
supervise() {
    local run_dir=$1 cache_dir=$2 config=$3 code=0
    shift 3
    exec 8>"$state/lock"
    flock -n 8 || exit 1
    trap '' HUP
    cd "$root"
    export JAX_PLATFORMS=tpu PYTHONUNBUFFERED=1 JAX_COMPILATION_CACHE_DIR="$cache_dir"
    date -u "+spade-jax: worker $index, started at %Y-%m-%dT%H:%M:%SZ"
    # On a machine that is not spot the address always says FALSE.
    .venv/bin/spade-jax train "$config" --run.preemption-url "$METADATA/instance/preempted" "$@" \
        --run.dir "$run_dir" --resume-if-any 8>&- &
    echo $! >"$state/pid"
    wait $! || code=$?
    echo "$code" >"$state/exit"
}

status() {
    if is_running; then
        answer status running
    elif [ -e "$state/exit" ]; then
        answer status exited "$(cat "$state/exit")"
    elif [ -e "$state/pid" ]; then
        answer status exited 137 # with the machine, or killed along with what watched it
    else
        answer status idle
    fi
}

stop() {
    local _
    if is_running && [ -e "$state/pid" ]; then
        kill -TERM "$(cat "$state/pid")" 2>/dev/null || true
        for _ in $(seq 120); do
            is_running || break
            sleep 1
        done
        if is_running; then
            say "worker $index: the run did not end in time and is killed; what it did since its last checkpoint is lost"
            kill -KILL "$(cat "$state/pid")" 2>/dev/null || true
            sleep 1
        fi
    fi
    answer stopped
}

# The newest LINES lines and all that follow, until the run ends.
follow() {
    local pid
    pid=$(cat "$state/pid" 2>/dev/null) || fail "worker $index: there is no run"
    tail -n "$1" -F --pid "$pid" "$log" 2>/dev/null
}

command=${1:-}
shift || true
case $command in
install) install_all ;;
start | supervise | status | stop | follow) "$command" "$@" ;;
tail) tail -n 40 "$log" 2>/dev/null || true ;;
*) fail "unknown command '$command'; see the top of launch/worker.sh" ;;
esac
