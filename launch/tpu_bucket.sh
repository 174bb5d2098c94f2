# shellcheck shell=bash disable=SC2154
# Sourced by launch/tpu.sh, whose options it reads: what the launcher looks for and leaves in the bucket. With --stop or
# --delete that is a request, an object of its own in BUCKET/asked/NAME: a launcher that follows the run, perhaps from another
# machine, would otherwise take what comes of it for machines that were taken away, and undo it. It heeds the requests that
# were not there when it began, so nothing has to be removed or overwritten.

heeded='' # the requests of before this launcher

check_bucket() {
    local errors bare=${bucket#gs://}
    # Listing asks for no more rights than a run needs.
    errors=$(cloud storage ls "gs://${bare%%/*}" 2>&1 >/dev/null) ||
        fail "--bucket gs://${bare%%/*} cannot be used: $(one_line "$errors"); make it with: gcloud storage buckets create"
}

# Print what is at a place in the bucket; nothing and 0 when nothing is there, an error when nobody can say.
listed() {
    local errors answer code=0
    errors=$(mktemp)
    answer=$(cloud storage ls "$1" 2>"$errors") || code=$?
    if [ "$code" != 0 ] && grep -qi 'matched no objects' "$errors"; then
        answer='' code=0
    fi
    [ "$code" = 0 ] || sed 's/^/    /' "$errors" >&2
    rm -f "$errors"
    printf '%s\n' "$answer"
    return "$code"
}

# Set `found` to what is at a place in the bucket, however long it takes to answer.
look_in_bucket() {
    local tries=0
    until found=$(listed "$1"); do
        ask_again "$tries" "what is in $1"
        tries=$((tries + 1))
    done
}

has_summary() {
    look_in_bucket "$bucket/runs/$name/summary.md"
    [ -n "$found" ]
}

# Ask a launcher that follows the run to let it be.
leave_request() {
    local request
    request="$bucket/asked/$name/$(date -u +%Y%m%dT%H%M%SZ)-$action-$$"
    cloud storage cp - "$request" <<<"$action, asked for by $(id -un) on $(hostname)" >&2 ||
        say "the request could not be left in $bucket (gcloud's message is above): if a launcher follows the run elsewhere," \
            "end it there first, or it undoes this"
}

heed_no_older() {
    look_in_bucket "$bucket/asked/$name/"
    heeded=$found
}

# Ends this launcher if somebody has asked for it since it began.
end_if_asked() {
    local request
    look_in_bucket "$bucket/asked/$name/"
    request=$(comm -13 <(sort <<<"$heeded") <(sort <<<"$found") | grep -E -- '-(stop|delete)-[0-9]+$' | tail -n 1) || return 0
    stop_following
    case $request in
    *-delete-*) say "somebody asked to give $name back ($request), so this launcher ends and asks for no new machines" ;;
    *) say "somebody asked to stop the run ($request), so this launcher ends and does not resume it" ;;
    esac
    say "to go on with the run: $again"
    exit 130
}
