#!/usr/bin/env bash
# Run a config on the NVIDIA GPUs of this machine, set-up included:
#     bash launch/gpu.sh [--gpus all|N|0,2,...] [--config FILE] [--section.field value ...]
#     bash launch/gpu.sh --install
#
#   --gpus WHICH   all of them (default), the first N, or those with these indices
#   --config FILE  the config, a path in this repository (default: configs/tiny.py)
#   --install      only install, which needs the network and no GPU: for machines whose GPUs have no network
#
# Further arguments go to `spade-jax train`; mesh.* says how the GPUs share the work. Without --run.dir a run goes to
# runs/CONFIG. With Slurm: launch/slurm.sbatch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"
# shellcheck source=launch/nvidia.sh
. "$root/launch/nvidia.sh"

# Print the indices, with commas, of the GPUs that --gpus means.
chosen_gpus() {
    local which=$1 there=$2 count index
    count=$(printf '%s\n' "$there" | wc -l)
    case $which in
    all) which=$(printf '%s\n' "$there" | tr '\n' ',') && which=${which%,} ;;
    *,*) ;;
    *)
        [[ $which =~ ^[1-9][0-9]*$ ]] || fail "--gpus $which: expected all, a number of GPUs, or indices such as 0,2"
        [ "$which" -le "$count" ] || fail "--gpus $which: this machine has $count"
        which=$(printf '%s\n' "$there" | head -n "$which" | tr '\n' ',') && which=${which%,}
        ;;
    esac
    for index in $(printf '%s' "$which" | tr ',' ' '); do
        printf '%s\n' "$there" | grep -qx "$index" ||
            fail "--gpus $which: there is no GPU $index; this machine has $(printf '%s' "$there" | tr '\n' ' ')"
    done
    printf '%s\n' "$which"
}

gpus=all
config=configs/tiny.py
while [ $# -gt 0 ]; do
    case $1 in
    --gpus | --config)
        [ $# -gt 1 ] || fail "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --install)
        ensure_venv "$root/.venv" cuda
        exit 0
        ;;
    -h | --help)
        sed -n '2,/^set /s/^#\{1\} \{0,1\}//p' "$root/launch/gpu.sh"
        exit 0
        ;;
    *) break ;;
    esac
done
[ -f "$root/$config" ] || fail "--config $config: there is no such file in $root; paths are relative to it"

found=$(find_gpus) || exit 1
printf '%s\n' "$found" | sed 's/^/spade-jax: GPU /'
# What Slurm or the user already gave this process is all there is.
visible=${CUDA_VISIBLE_DEVICES-}
[ -n "$visible" ] || visible=$(printf '%s\n' "$found" | cut -d, -f1 | tr -d ' ' | tr '\n' ',')
visible=$(chosen_gpus "$gpus" "$(printf '%s' "${visible%,}" | tr ',' '\n')")
export CUDA_VISIBLE_DEVICES="$visible"
export JAX_PLATFORMS=cuda

ensure_venv "$root/.venv" cuda
cd "$root"
wanted=$(printf '%s' "$visible" | tr ',' '\n' | grep -c .)
seen=$(.venv/bin/python -c 'import jax; print(jax.local_device_count(), jax.devices()[0].device_kind)') ||
    fail "jax does not start on the GPUs; its message is above"
[ "${seen%% *}" = "$wanted" ] || fail "jax sees ${seen%% *} GPU(s) of the $wanted chosen ($visible)"

case " $* " in
*" --run.dir"*) ;;
*) set -- --run.dir "runs/$(basename "$config" .py)" "$@" ;;
esac
say "on $wanted x ${seen#* }: spade-jax train $config $*"
exec .venv/bin/spade-jax train "$config" "$@"
