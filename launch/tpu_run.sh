# shellcheck shell=bash disable=SC2154,SC2034
# Sourced by launch/tpu.sh, whose options it reads: the code and the run on the machines. What a worker does is in
# launch/worker.sh. A step counts as done when every worker has said so in a line of its own: gcloud's exit status does
# not tell which worker failed.

# What became of a step or of the run; none of these is the exit code of a program.
GONE=11    # the machines were taken away
FAILED=12  # it failed on machines that are there
PASSING=13 # what failed lies outside of the run and may pass
REFUSED=14 # the run refused its settings or its folder: trying again cannot help
follower=''

worker_does() { # the command that makes a worker do something
    printf 'bash spade_jax/launch/worker.sh'
    printf ' %q' "$@"
}

# Start the run on all workers, or find it running, and see it to its end.
attempt() {
    local running
    workers=$(num_workers) || { lost "gcloud does not list the workers" || return $?; }
    if read_statuses; then
        running=$(grep -c ' running$' <<<"$statuses") || running=0
        if [ "$running" = "$workers" ] && [ -z "$dry_run" ]; then
            say "the run is going on $workers worker(s); following the log of worker 0"
            watch
            return
        fi
        [ "$running" = 0 ] || stop_run || return $? # some are: one of them was lost
    fi
    send_code || { lost "the code could not be copied to the workers" || return $?; }
    [ -n "$dry_run" ] || say "installing on $workers worker(s); the first time this takes some minutes"
    on_all installed "$(unpack_command) && $(worker_does install)" || return $?
    end_if_asked
    on_all started "$(worker_does start "$bucket/runs/$name" "$bucket/jax-cache" "$config" ${settings[@]+"${settings[@]}"})" || return $?
    [ -n "$dry_run" ] || say "started on $workers worker(s); following the log of worker 0. Ctrl-C leaves the run going"
    watch
}

# lost WHY: tell machines that are gone from a step that failed on them. Never returns 0.
lost() {
    ! taken_away || return "$GONE"
    say "$1"
    return "$FAILED"
}

# on_all MARK COMMAND: on every worker, which must all say MARK. What they print is shown.
on_all() {
    local mark=$1 heard missing
    heard=$(mktemp)
    on_worker all "$2" 2>&1 | tee "$heard" | grep -v '^spade-jax-worker ' || true
    if [ -n "$dry_run" ]; then
        cat "$heard"
        rm -f "$heard"
        return 0
    fi
    missing=$(comm -23 <(seq 0 $((workers - 1)) | sort) <(sed -n "s/.*spade-jax-worker \([0-9]*\) $mark.*/\1/p" "$heard" | sort -u))
    rm -f "$heard"
    [ -z "$missing" ] || lost "not $mark: worker(s) $(printf '%s' "$missing" | sort -n | tr '\n' ' ')of $workers; the reason is above"
}

# The files of the working tree that git would track, and the revision they are of, which the workers have no git to ask for.
send_code() {
    local archive folder code=0
    if [ -n "$dry_run" ]; then
        show git -C "$root" ls-files -co --exclude-standard
        tpus tpu-vm scp spade_jax.tar.gz "$name:" --worker all "${SSH_FLAGS[@]/#/--scp-flag=}"
        return 0
    fi
    folder=$(mktemp -d)
    archive=$folder/spade_jax.tar.gz
    (
        cd "$root"
        git rev-parse HEAD >/dev/null || fail "the code is sent from a git checkout, and $root is none"
        git ls-files -co --exclude-standard | while IFS= read -r file; do
            [ ! -e "$file" ] || printf '%s\n' "$file" # one that was removed but is still in the index
        done >"$folder/files"
        git describe --always --dirty --abbrev=40 --exclude='*' >"$folder/.revision"
        tar -czf "$archive" -T "$folder/files" -C "$folder" .revision
    ) || code=$?
    [ "$code" != 0 ] || tpus tpu-vm scp "$archive" "$name:" --worker all "${SSH_FLAGS[@]/#/--scp-flag=}" >&2 || code=$?
    rm -rf "$folder"
    return "$code"
}

# Files that are no longer in the code must not stay behind; the environment may.
unpack_command() {
    printf '%s' 'mkdir -p spade_jax && find spade_jax -mindepth 1 -maxdepth 1 ! -name ".venv*" -exec rm -rf {} +' \
        ' && tar -xzf spade_jax.tar.gz -C spade_jax'
}

# Sets `statuses`, a line "INDEX running|idle|exited CODE" a worker; fails unless every worker answered.
read_statuses() {
    local answer
    statuses=''
    answer=$(on_worker all "if [ -e spade_jax/launch/worker.sh ]; then $(worker_does status); fi" 2>/dev/null) || true
    statuses=$(sed -n 's/.*spade-jax-worker \([0-9]*\) status /\1 /p' <<<"$answer" | sort -n)
    [ -n "$statuses" ] && [ "$(wc -l <<<"$statuses")" -eq "$workers" ]
}

# From so many lines before the end of the log. A process group of its own, so that all of it can be ended.
follow() {
    set -m
    on_worker 0 "$(worker_does follow "$1")" </dev/null &
    follower=$!
    set +m
}

stop_following() {
    [ -n "$follower" ] || return 0
    kill -- "-$follower" 2>/dev/null || true
    wait "$follower" 2>/dev/null || true
    follower=''
}

# Show the log of worker 0 and look after all workers, until the run or the machines end.
watch() {
    local unheard=0 uneven=0 code
    follow 50
    if [ -n "$dry_run" ]; then
        wait
        on_worker all "$(worker_does status)"
        has_summary
        return 0
    fi
    while :; do
        sleep "$poll_s"
        if taken_away; then
            stop_following
            return "$GONE"
        fi
        code=0
        if read_statuses; then
            unheard=0
            judge || code=$?
        else
            unheard=$((unheard + 1))
            [ "$unheard" -ge 5 ] || continue
            if [ -z "$statuses" ]; then # perhaps they cannot be reached from here, and then nothing can be done from here
                say "no worker answers, although the machines are said to be ready; the run is left alone; asking again"
                pause $((unheard - 5))
                continue
            fi
            say "not every worker answers, although the machines are said to be ready; heard: $(tr '\n' ';' <<<"$statuses")"
            code=$FAILED
        fi
        if [ "$code" = 0 ]; then # all are running
            uneven=0
            kill -0 "$follower" 2>/dev/null || follow 20
            continue
        fi
        if [ "$code" = 1 ]; then # some have come to their end, and the others should soon
            uneven=$((uneven + 1))
            [ "$uneven" -ge 10 ] || continue
            say "some workers ended and the others do not: $(tr '\n' ';' <<<"$statuses")"
            code=$FAILED
        fi
        stop_following
        if [ "$code" = 2 ]; then
            finished
            return
        fi
        stop_run || true # whether what was not stopped is still there is asked before the next try
        return "$code"
    done
}

# What the statuses mean: 0 running, 1 ending, 2 all ended well, else the outcome.
judge() {
    local bad told index code
    bad=$(grep -E ' (idle|exited [1-9][0-9]*)$' <<<"$statuses") || bad=
    if [ -z "$bad" ]; then
        grep -q ' running$' <<<"$statuses" || return 2
        ! grep -q ' exited 0$' <<<"$statuses"
        return
    fi
    # A worker ends with 3 because of another one, which knows more and may still be about to end.
    if ! grep -qv ' exited 3$' <<<"$bad" && grep -q ' running$' <<<"$statuses"; then
        return 1
    fi
    # Who refused its settings knows most. Who waited in vain for the others (75 too) knows next to nothing.
    told=$(grep ' exited 2$' <<<"$bad" || grep -vE ' exited (3|75)$' <<<"$bad" || grep ' exited 75$' <<<"$bad" || printf '%s' "$bad")
    told=${told%%$'\n'*}
    index=${told%% *} code=${told##* }
    say "the run ended on worker $index of $workers ($code); the end of its log:"
    on_worker "$index" "$(worker_does tail)" 2>/dev/null | sed 's/^/    /' || true
    case $code in
    2) return "$REFUSED" ;;
    75) return "$PASSING" ;;
    *) return "$FAILED" ;;
    esac
}

# A run that is told to stop, as before its machines are taken away, saves and ends well too: only the summary tells that
# it came to its last step.
finished() {
    has_summary || lost "the run was stopped before its last step"
}

# Fails, and never ends the launcher, when not every worker can be reached.
stop_run() {
    workers=$(num_workers) || { lost "$name has no workers that could be reached" || return $?; }
    [ -n "$dry_run" ] || say "stopping the run; it saves first"
    on_all stopped "$(worker_does stop)"
}
