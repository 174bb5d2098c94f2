#!/usr/bin/env bash
# Run the main job on this machine, set-up included:
#     bash launch/local.sh [--config FILE] [--section.field value ...]
# FILE is configs/tiny.py unless given. Paths are relative to the repository. JAX_PLATFORMS chooses the device; it is `cpu`
# unless set. Without --run.dir a run goes to runs/ and the file's name, or to runs/tiny-2 and so on when that is taken;
# --resume goes on with the last of them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"

config=configs/tiny.py
if [ "${1:-}" = --config ]; then
    [ $# -ge 2 ] || fail "--config needs a file, such as configs/micro.py"
    config=$2
    shift 2
fi
cd "$root"
[ -f "$config" ] || fail "--config $config is no file in $root; give one of configs/, or an absolute path"

ensure_venv "$root/.venv" ""
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# The memory of a program's call goes back to the system after it. In huge pages the next call gets it faster.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

# A run never writes into the folder of another one; a folder with a config.json holds a run.
case " $* " in
*" --run.dir"*) ;;
*)
    last=
    name=$(basename "$config" .py)
    folder=runs/$name
    number=1
    while [ -e "$folder" ]; do
        [ ! -e "$folder/config.json" ] || last=$folder
        number=$((number + 1))
        folder=runs/$name-$number
    done
    case " $* " in
    *" --resume "*) folder=${last:-$folder} ;;
    esac
    set -- --run.dir "$folder" "$@"
    ;;
esac
say "on $JAX_PLATFORMS: spade-jax train $config $*"
exec "$root/.venv/bin/spade-jax" train "$config" "$@"
