#!/usr/bin/env bash
# Run a config on Cloud TPUs, from any machine that has gcloud:
#     bash launch/tpu.sh --name NAME --zone ZONE --type v5p-128 --bucket gs://BUCKET[/PATH] [option ...] [-- --section.field value ...]
#
#   --name NAME      of the queued resource and of the run, whose folder is BUCKET/runs/NAME
#   --zone ZONE      such as us-east5-a
#   --type TYPE      accelerator type, such as v5litepod-8, v5p-128, v6e-64
#   --bucket BUCKET  holds the run folder and, in BUCKET/jax-cache, the compiled programs
#   --config FILE    the config, a path in this repository (default: configs/tiny.py)
#   --spot           ask for spot capacity: cheaper, and may be taken away at any time
#   --project ID     (default: that of gcloud)
#   --version NAME   runtime version of the machines (default: the one for TYPE)
#   --retries N      how often a run or a request that failed in itself is tried again in a row (default: 3); four times as
#                    often, with growing pauses, where the run says that the reason may pass
#   --poll-s S       seconds between two looks at the machines (default: 30)
#   --dry-run        print every command and run none
#   --stop           stop the run, which saves first; the machines stay
#   --delete         end the run and give the machines back; the bucket stays
#
# The same command again goes on from wherever things stand: it makes the machines or finds them, starts the run, resumes it
# or follows it. When the machines are taken away it asks for new ones and resumes. Ctrl-C leaves the run going; then nobody
# asks for new machines until this runs again. A launcher that follows the run ends when --stop or --delete is given elsewhere.
# Exit codes: 0 the run is done (or stopped, or given back, as asked), 1 it is not, for the reason that is said, 130 ended by
# Ctrl-C or by such a request. What it does not do: slices joined over the data-centre network, and on-premise machines.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/setup.sh
. "$root/launch/setup.sh"
# shellcheck source=launch/tpu_machines.sh
. "$root/launch/tpu_machines.sh"
# shellcheck source=launch/tpu_bucket.sh
. "$root/launch/tpu_bucket.sh"
# shellcheck source=launch/tpu_run.sh
. "$root/launch/tpu_run.sh"
again="bash launch/tpu.sh$(printf ' %q' "$@")"
exec 3>&1 # where --dry-run prints, also from within $(...)

usage() { sed -n '2,/^set /s/^#\{1\} \{0,1\}//p' "$root/launch/tpu.sh"; }

name='' zone='' type='' bucket='' config=configs/tiny.py project='' version='' spot='' dry_run='' action=run
retries=3
poll_s=30

read_options() {
    local option value
    while [ $# -gt 0 ]; do
        option=$1
        shift
        case $option in
        --spot) spot=yes && continue ;;
        --dry-run) dry_run=yes && continue ;;
        --stop) action=stop && continue ;;
        --delete) action=delete && continue ;;
        -h | --help) usage && exit 0 ;;
        --) break ;;
        --*=*) value=${option#*=} option=${option%%=*} ;;
        --*)
            [ $# -gt 0 ] || fail "$option needs a value; --help lists every option"
            value=$1
            shift
            ;;
        *) fail "unexpected argument $option; settings of the run stand after --, as in: -- --run.steps 100" ;;
        esac
        case $option in
        --name | --zone | --type | --bucket | --config | --project | --version | --retries) ;;
        --poll-s) option=--poll_s ;;
        *.*) fail "$option is a setting of the run; settings stand after --, as in: -- $option $value" ;;
        *) fail "unknown option $option; --help lists every option" ;;
        esac
        printf -v "${option#--}" %s "$value"
    done
    settings=("$@")
}

# Refuse what cannot be, before anything is asked for.
check_options() {
    local option
    for option in name zone; do
        [ -n "${!option}" ] || fail "--$option is missing; --help lists every option"
    done
    if [ -z "$bucket" ] && [ "$action" != run ]; then
        fail "--bucket is missing: there a launcher that follows the run learns of --$action. If none does, gcloud will do:" \
            "gcloud compute tpus queued-resources delete $name --zone $zone --force gives the machines back"
    fi
    [[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
        fail "--name $name: expected up to 40 small letters, digits and '-', a letter first"
    [[ $retries =~ ^[0-9]+$ ]] || fail "--retries $retries: expected a number of tries, such as 3"
    [[ $poll_s =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "--poll-s $poll_s: expected seconds, such as 30"
    [ -n "$dry_run" ] || command -v gcloud >/dev/null 2>&1 ||
        fail "gcloud was not found; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install)," \
            "then: gcloud auth login"
    bucket=${bucket%/}
    [ -z "$bucket" ] || [[ $bucket =~ ^gs://[a-z0-9][-_.a-z0-9]+(/[^[:space:]]*)?$ ]] ||
        fail "--bucket $bucket: expected gs://BUCKET or gs://BUCKET/PATH"
    [ "$action" = run ] || return 0
    for option in type bucket; do
        [ -n "${!option}" ] || fail "--$option is missing; --help lists every option"
    done
    [ -f "$root/$config" ] || fail "--config $config: there is no such file in $root; paths are relative to it"
    case " ${settings[*]-} " in
    *" --run.dir"* | *" --resume"*)
        fail "--run.dir and --resume are the launcher's: the folder is $bucket/runs/$name, resumed when it holds a run" ;;
    esac
    [ -n "$version" ] || version=$(default_version)
}

# The runtime version that is documented for the type.
default_version() {
    case $type in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "--type $type: expected v4-*, v5litepod-*, v5p-* or v6e-*; for another one name its runtime with --version" ;;
    esac
}

interrupted() {
    trap - INT TERM
    if [ -n "$follower" ]; then
        stop_following
        say "no longer following. The run goes on, but nobody replaces machines that are taken away. To follow it again:"
    else
        say "interrupted; machines that were asked for stay so. To go on:"
    fi
    say "    $again"
    say "to stop the run (it saves first) add --stop, to give the machines back add --delete"
    exit 130
}

# Bring the run to its end over any number of machines.
run_to_the_end() {
    local failures=0 most begun outcome
    trap interrupted INT TERM
    check_bucket
    heed_no_older
    while :; do
        ensure_machines
        begun=$SECONDS
        outcome=0
        attempt || outcome=$?
        [ "$outcome" != 0 ] || break
        end_if_asked
        [ "$outcome" != "$REFUSED" ] ||
            fail "the run refused its settings or its folder (the reason is above); it is not tried again"
        if [ "$outcome" != "$GONE" ]; then
            sleep "$poll_s" # what runs on a machine that is taken away fails before it is said to be gone
            ! taken_away || outcome=$GONE
        fi
        if [ "$outcome" = "$GONE" ]; then
            say "the machines were taken away; asking for new ones, then the run resumes from its newest checkpoint"
            failures=0
            continue
        fi
        [ $((SECONDS - begun)) -lt 1800 ] || failures=0 # it got somewhere in between
        failures=$((failures + 1))
        most=$retries
        [ "$outcome" != "$PASSING" ] || most=$((4 * retries))
        [ "$failures" -le "$most" ] ||
            fail "the run failed $failures times in a row on machines that are there; the reasons are above." \
                "The machines are still yours: to give them back, add --delete"
        say "trying again ($failures of $most); the run resumes from its newest checkpoint"
        [ "$outcome" != "$PASSING" ] || pause "$failures"
    done
    say "the run is done: $bucket/runs/$name"
    say "the machines are still yours; to give them back:" \
        "bash launch/tpu.sh --name $name --zone $zone --bucket $bucket${project:+ --project $project} --delete"
}

stop_on_request() {
    local code=0
    leave_request
    stop_run || code=$?
    [ "$code" != "$GONE" ] || fail "$name has no machines now, so nothing runs; a launcher that follows it ends at its next step"
    [ "$code" = 0 ] || fail "the run could not be stopped on every worker; the reason is above"
}

delete_on_request() {
    leave_request
    delete_machines
    say "$name is gone; its bucket was left alone"
}

settings=()
read_options "$@"
check_options
case $action in
run) run_to_the_end ;;
stop) stop_on_request ;;
delete) delete_on_request ;;
esac
