# shellcheck shell=bash disable=SC2154
# Sourced by launch/tpu.sh, whose options it reads: the machines of a queued resource, through gcloud. It holds one TPU,
# and both have the same name. Once gcloud has answered, no silence of it ends the launcher: the run may well go on over there,
# and would be followed by nobody.

# A connection that is lost must end the command, which would otherwise wait for ever.
SSH_FLAGS=(-oConnectTimeout=30 -oServerAliveInterval=30)
reached=''      # whether gcloud has ever said what the machines are
had_machines='' # whether they were ever ready

show() {
    {
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    } >&3
}

# cloud WORDS...: run gcloud, or with --dry-run only show the command.
cloud() {
    set -- gcloud "$@" --quiet
    [ -z "$project" ] || set -- "$@" --project "$project"
    if [ -n "$dry_run" ]; then
        show "$@"
        return 0
    fi
    "$@"
}

tpus() {
    cloud compute tpus "$@" --zone "$zone"
}

# pause TRIES: before the next look, after so many in vain: --poll-s, and up to sixteen times as long.
pause() {
    local left=$((1 << ($1 < 4 ? $1 : 4)))
    for (( ; left > 0; left--)); do # one by one, since a signal is only heard in between
        sleep "$poll_s"
    done
}

# ask_again TRIES WHAT: say what gcloud does not tell, and wait.
ask_again() {
    say "gcloud does not say $2; its message is above. Nothing is done meanwhile; asking again"
    pause "$1"
}

# described KIND FORMAT: one property; empty and 0 when there is no such thing, an error when nobody can say. An answer
# that never came must not read as "there is none": the machines would be asked for twice.
described() {
    local kind=$1 format=$2 errors answer tries
    errors=$(mktemp)
    for tries in 1 2 3; do
        if answer=$(tpus "$kind" describe "$name" --format "value($format)" 2>"$errors"); then
            rm -f "$errors"
            printf '%s\n' "$answer"
            return 0
        fi
        if grep -qiE 'NOT_FOUND|not found|does not exist|HTTPError 404' "$errors"; then
            rm -f "$errors"
            return 0
        fi
        [ "$tries" = 3 ] || sleep "$poll_s"
    done
    sed 's/^/    /' "$errors" >&2
    rm -f "$errors"
    return 1
}

# Print what the machines are: ready, absent, waiting, gone (taken away), failed or deleting, and the word it was read from.
machine_state() {
    local answer
    if [ -n "$dry_run" ]; then
        described queued-resources state.state >/dev/null
        printf '%s\n' "$dry_state dry-run"
        return 0
    fi
    answer=$(described queued-resources state.state) || return 1
    # Some versions of gcloud wrap the word, as in {'state': 'ACTIVE'}.
    answer=$(printf '%s' "$answer" | grep -oE '[A-Z][A-Z_]+' | head -n 1) || answer=
    case $answer in
    '') echo "absent -" ;;
    ACTIVE) node_state ;;
    SUSPENDING | SUSPENDED) echo "gone $answer" ;;
    FAILED) echo "failed $answer" ;;
    DELETING) echo "deleting $answer" ;;
    *) echo "waiting $answer" ;; # WAITING_FOR_RESOURCES, ACCEPTED, CREATING, PROVISIONING, and what is not known yet
    esac
}

# A resource can be called active for a while after its TPU was taken away.
node_state() {
    local answer
    answer=$(described tpu-vm state) || return 1
    answer=$(printf '%s' "$answer" | grep -oE '[A-Z][A-Z_]+' | head -n 1) || answer=
    case $answer in
    READY) echo "ready $answer" ;;
    PREEMPTED | TERMINATED | STOPPED | STOPPING | DELETING) echo "gone $answer" ;;
    '') echo "gone NOT_FOUND" ;;
    *) echo "waiting $answer" ;;
    esac
}

# Set `seen` to what the machines are, however long gcloud takes to answer. If it never has, something is wrong with it here.
look() {
    local tries=0
    until seen=$(machine_state); do
        if [ -z "$reached" ] && [ "$tries" -ge "$retries" ]; then
            [ "$action" != delete ] || say "$name was not given back; IT MAY STILL COST MONEY"
            fail "gcloud does not say what $name is; its message is above"
        fi
        ask_again "$tries" "what $name is"
        tries=$((tries + 1))
    done
    [ "$tries" = 0 ] || say "gcloud answers again"
    reached=yes
}

# Whether the machines are not, or no longer, ready.
taken_away() {
    look
    [ "${seen%% *}" != ready ]
}

one_line() { printf '%s' "$1" | tr -s '\n\t ' ' ' | cut -c 1-400; }

# Wait for machines that are ready; ask for them where there are none.
ensure_machines() {
    local last='' failures=0 refusals=0
    dry_state=absent
    while :; do
        look
        [ "$seen" = "$last" ] || [ -n "$dry_run" ] || say "$name: ${seen%% *} (${seen#* })"
        last=$seen
        case ${seen%% *} in
        ready)
            check_type
            had_machines=yes
            return
            ;;
        absent)
            end_if_asked
            if create_machines; then
                refusals=0
            else
                pause "$refusals"
                refusals=$((refusals + 1))
            fi
            ;;
        gone) delete_machines ;;
        failed)
            failures=$((failures + 1))
            explain_failure "$failures"
            delete_machines
            pause $((failures - 1))
            ;;
        esac
        [ -n "$dry_run" ] || sleep "$poll_s"
    done
}

# Fails when the request is to be made again.
create_machines() {
    local answer
    [ -n "$dry_run" ] || say "asking for $type in $zone${spot:+, spot}, runtime $version"
    dry_state=ready
    answer=$(tpus queued-resources create "$name" --node-id "$name" --accelerator-type "$type" \
        --runtime-version "$version" --async ${spot:+--spot} 2>&1) && return
    explain_refusal "$answer"
}

# Say what is wrong with a request that was refused; come back only if it may go through later, and fail then.
explain_refusal() {
    local refusal
    refusal=$(printf '%s' "$1" | tr '[:upper:]' '[:lower:]')
    case $refusal in *already*exists*) return 0 ;; esac # made in the meantime; the next look finds it
    if [ -n "$had_machines" ]; then # those that were taken away may count for a while; and a run waits for new ones
        say "a request for $type in $zone was granted before and is now refused; trying again: $(one_line "$1")"
        return 1
    fi
    case $refusal in
    *quota*)
        fail "no quota for $type in $zone: $(one_line "$1"). Ask for quota (https://console.cloud.google.com/iam-admin/quotas)," \
            "or choose another --zone or a smaller --type; spot and ordinary capacity have quotas of their own" ;;
    *unavailable* | *deadline* | *internal* | *try\ again* | *timed\ out*)
        say "the request did not go through, trying again: $(one_line "$1")"
        return 1
        ;;
    *permission* | *forbidden* | *unauthenticated* | *login* | *has\ not\ been\ used*)
        fail "not allowed to ask for TPUs: $(one_line "$1"). Log in with gcloud auth login, and see that the Cloud TPU API" \
            "is enabled in the project and that you may create TPUs there" ;;
    *) fail "the request for $type in $zone was refused: $(one_line "$1")" ;;
    esac
}

# A request that ended without machines says why in its state.
explain_failure() {
    local reason
    reason=$(described queued-resources 'state.failedData.error.message') || reason=
    case $(printf '%s' "$reason" | tr '[:upper:]' '[:lower:]') in
    *quota*) explain_refusal "$reason" || true ;;
    esac
    reason=$(one_line "${reason:-no reason was given}")
    [ "$1" -le "$retries" ] || [ -n "$had_machines" ] || fail "the request for $type failed $1 times: $reason"
    say "the request for $type failed, for the $1. time: $reason; asking again"
}

# Machines of the same name but another type are somebody's, perhaps another run's.
check_type() {
    local there
    [ -z "$dry_run" ] || return 0
    there=$(described queued-resources 'tpu.nodeSpec[0].node.acceleratorType') || there=
    there=${there##*/}
    [ -z "$there" ] || [ "$there" = "$type" ] ||
        fail "$name is a $there, and --type is $type; choose another --name, or give it back first with --delete"
}

# Returns when there are none.
delete_machines() {
    local tries=0
    [ -n "$dry_run" ] || say "giving $name back"
    dry_state=absent
    while :; do
        look
        case $seen in
        absent*)
            [ -z "$dry_run" ] || tpus queued-resources delete "$name" --force
            return 0
            ;;
        deleting*) ;;
        *)
            # On the way to new machines there is somebody who waits, and nothing is gained by giving up.
            [ "$action" = run ] || [ "$tries" -le "$retries" ] ||
                fail "$name could not be given back; IT MAY STILL COST MONEY. gcloud's message is above"
            tpus queued-resources delete "$name" --force >&2 || say "deleting $name did not go through; trying again"
            tries=$((tries + 1))
            ;;
        esac
        pause "$((tries > 0 ? tries - 1 : 0))"
    done
}

num_workers() {
    local addresses count
    if [ -n "$dry_run" ]; then
        tpus tpu-vm describe "$name" --format 'value(networkEndpoints[].ipAddress)'
        echo 1
        return 0
    fi
    addresses=$(described tpu-vm 'networkEndpoints[].ipAddress') || return 1
    count=$(printf '%s' "$addresses" | grep -oE '[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+' | wc -l)
    [ "$count" -gt 0 ] || return 1
    echo $((count))
}

# on_worker WHICH COMMAND: WHICH is a number or `all`.
on_worker() {
    tpus tpu-vm ssh "$name" --worker "$1" --command "$2" "${SSH_FLAGS[@]/#/--ssh-flag=}"
}
