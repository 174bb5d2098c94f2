#!/usr/bin/env bash
# Run the main job, configs/tiny.py, on this machine, set-up included:
#     bash launch/local.sh [--section.field value ...]
# Paths are relative to the repository. JAX_PLATFORMS chooses the device; it is `cpu` unless set. Without --run.dir a run goes
# to runs/tiny, or to runs/tiny-2 and so on when that is taken; --resume goes on with the last of them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"

ensure_venv "$root/.venv" ""
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
cd "$root"

# A run never writes into the folder of another one; a folder with a config.json holds a run.
case " $* " in
*" --run.dir"*) ;;
*)
    last=
    folder=runs/tiny
    number=1
    while [ -e "$folder" ]; do
        [ ! -e "$folder/config.json" ] || last=$folder
        number=$((number + 1))
        folder=runs/tiny-$number
    done
    case " $* " in
    *" --resume "*) folder=${last:-$folder} ;;
    esac
    set -- --run.dir "$folder" "$@"
    ;;
esac
say "on $JAX_PLATFORMS: spade-jax train configs/tiny.py $*"
exec "$root/.venv/bin/spade-jax" train configs/tiny.py "$@"
