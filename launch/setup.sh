# shellcheck shell=bash disable=SC2154
# Sourced by the launchers and by tests/run.sh, which set `root` to the repository: finds a Python and keeps a virtual
# environment in step with requirements.txt and pyproject.toml. Installs nothing outside that environment.

say() { printf 'spade-jax: %s\n' "$*"; }

fail() {
    printf 'spade-jax: %s\n' "$*" >&2
    exit 1
}

# Whether command $1 is a Python from 3.11 up to $2 that can make environments. Version-manager shims and
# distributions that split off `ensurepip` are found on the PATH but cannot be used, so each one is tried.
usable_python() {
    local needs='venv, ensurepip'
    command -v uv >/dev/null 2>&1 && needs='sys'
    "$1" -c "import sys, $needs; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $2))" >/dev/null 2>&1
}

# Print a usable Python: one of the tested versions if there is one, else a newer one.
find_python() {
    local newest candidate
    for newest in 13 99; do
        # uv fetches a tested version rather than take an untested one.
        if [ "$newest" = 99 ] && command -v uv >/dev/null 2>&1; then
            return 1
        fi
        for candidate in python3 python3.13 python3.12 python3.11 python; do
            if usable_python "$candidate" "$newest"; then
                command -v "$candidate"
                return
            fi
        done
    done
    return 1
}

# install VENV PIP_ARGUMENTS...: with uv where there is one, else with the environment's own pip.
install() {
    local venv=$1
    shift
    if command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
    fi
}

make_venv() {
    local venv=$1 python=$2
    if [ -z "$python" ]; then
        python=$(find_python) || python=
    fi
    if command -v uv >/dev/null 2>&1; then
        say "making $venv with uv and ${python:-a Python 3.13 that uv fetches}"
        uv venv --quiet --clear --python "${python:-3.13}" "$venv" ||
            fail "uv could not make $venv; its message is above"
    elif [ -n "$python" ]; then
        say "making $venv with $python ($("$python" --version 2>&1))"
        "$python" -m venv --clear "$venv" || fail "$python could not make $venv; its message is above"
    else
        fail "no Python 3.11 or newer with the venv module was found on the PATH;" \
            "install one (Debian and Ubuntu: apt install python3 python3-venv) or install uv, then run this again"
    fi
}

# ensure_venv VENV EXTRA [PYTHON]: make VENV, or mend it, so that this project with EXTRA (may be empty) is installed in it.
#
# A stamp per extra is written last and removed before any change. It holds the repository's path, which the installed
# scripts also hold, and a checksum of what was asked for. So an environment without a stamp was left half-made, and one
# with another path was moved: both are made anew. One with another checksum is brought up to date in place.
ensure_venv() {
    [ "$(uname -s)" = Linux ] || fail "this system is $(uname -s); the sandbox of the environments needs Linux"
    local venv=$1 extra=$2 python=${3:-} wanted stamp built start=$SECONDS
    wanted="$root $(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum)"
    stamp="$venv/spade-jax-installed${extra:+-$extra}"
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$venv.lock" # two set-ups at once would spoil one another
        flock 9
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! "$venv/bin/python" -c 'import spade_jax' 2>/dev/null; then
        built=$(cat "$venv/spade-jax-installed" 2>/dev/null) || built=
        if [ "${built% * *}" != "$root" ] || ! "$venv/bin/python" -c 'import spade_jax' 2>/dev/null; then
            make_venv "$venv" "$python"
        fi
        rm -f "$venv/spade-jax-installed"*
        say "installing the packages of requirements.txt; the first time this takes some minutes"
        (
            cd "$root"
            # What comes as source is built with the pinned setuptools, not with whatever is newest today.
            install "$venv" -c requirements.txt setuptools &&
                install "$venv" --no-build-isolation -c requirements.txt -e ".${extra:+[$extra]}"
        ) || fail "the packages could not be installed; the message is above. Running this again starts afresh"
        printf '%s\n' "$wanted" >"$venv/spade-jax-installed"
        [ -z "$extra" ] || printf '%s\n' "$wanted" >"$stamp"
        say "installed in $((SECONDS - start)) s"
    fi
    exec 9>&-
}
