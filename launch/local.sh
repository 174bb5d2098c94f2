#!/usr/bin/env bash
# Run the main job, configs/tiny.py, on this machine, set-up included:
#     bash launch/local.sh [--section.field value ...]
# Paths are relative to the repository. JAX_PLATFORMS chooses the device; it is `cpu` unless set.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"

ensure_venv "$root/.venv" ""
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
cd "$root"
say "on $JAX_PLATFORMS: spade-jax train configs/tiny.py $*"
exec "$root/.venv/bin/spade-jax" train configs/tiny.py "$@"
