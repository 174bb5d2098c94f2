#!/usr/bin/env bash
# Try this project on one NVIDIA GPU in at most ten minutes, and print one line of JSON:
#     bash launch/gpu_check.sh [--gpu INDEX] [--limit-s 600]
#
# Stages, in this order: driver, install, device, the tests marked `gpu`, the tiny run, the sampler's and the learner's
# benchmark. Each has its status in the JSON, and what failed, was cut short or was not reached says so there. What the
# stages print goes to stderr and to runs/gpu_check/. The exit code is 0 only if every stage passed. The minutes of the
# first installation are not counted: how fast a package index answers says nothing about the GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"
# shellcheck source=launch/nvidia.sh
. "$root/launch/nvidia.sh"

gpu=0
limit_s=600
while [ $# -gt 0 ]; do
    [[ ${2-} =~ ^[0-9]+$ ]] || fail "$1 needs a number"
    case $1 in
    --gpu) gpu=$2 ;;
    --limit-s) limit_s=$2 ;;
    *) fail "unknown option $1; expected --gpu INDEX or --limit-s SECONDS" ;;
    esac
    shift 2
done

# Before there is a Python of ours, a failure has to be put into JSON by hand.
failed_early() {
    local reason
    reason=$(printf '%s' "$2" | tr '\n\t\r' '   ' | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g')
    printf '{"ok": false, "stages": {"%s": {"status": "failed", "reason": "%s"}}}\n' "$1" "$reason"
    exit 1
}

found=$(find_gpus 2>&1) || failed_early driver "$found"
line=$(printf '%s\n' "$found" | grep -E "^ *$gpu,") || failed_early driver "there is no GPU $gpu; found: $found"
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
(ensure_venv "$root/.venv" cuda,dev) >"$messages" 2>&1 || failed_early install "$(tail -n 20 "$messages")"
cat "$messages" >&2
export CUDA_VISIBLE_DEVICES="$gpu" JAX_PLATFORMS=cuda
cd "$root"
code=0
"$root/.venv/bin/python" "$root/launch/gpu_check.py" --gpu "$line" --limit-s "$limit_s" || code=$?
case $code in
0 | 3) exit "$code" ;; # it has printed its line
*) failed_early stages "launch/gpu_check.py ended with exit code $code" ;;
esac
