#!/usr/bin/env bash
# Check the style and the types and pass the tests, set-up included:
#     bash tests/run.sh [pytest arguments ...]
# Tests run in as many processes as there are processors, at most four; `-n 0` runs them in one.
# Tests marked `slow` are left to .ci/run, tests marked `gpu` or `tpu` to machines that have one.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"

ensure_venv "$root/.venv" dev
python="$root/.venv/bin/python"
cd "$root"
failed=()

check() {
    local name=$1 start=$SECONDS
    shift
    "$python" -m "$@" || failed+=("$name")
    say "$name took $((SECONDS - start)) s"
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "pyright" basedpyright --pythonpath "$python"
check "pytest" pytest -n auto -m "not slow and not gpu and not tpu" "$@"

if [ ${#failed[@]} -gt 0 ]; then
    fail "failed: ${failed[*]}"
fi
say "ruff, pyright and pytest passed in $SECONDS s"
