#!/bin/sh
# Unpack Prometheus and Alertmanager from the system's own Debian archive into FOLDER (default: .tools of this clone).
#
#   usage: tools/fetch_servers.sh [FOLDER]
#
# Nothing is installed and no service is started: packages are downloaded with apt's lists and cache in a private
# folder, which needs neither root nor lists fetched before, and unpacked. FOLDER/bin then has prometheus, promtool,
# alertmanager and amtool. FOLDER appears complete or not at all.
#
# Where the servers cannot be had it says so in one line and ends with code 0, because the demo and the tests can do
# without them; with CI=true it ends with code 1, because there they may not.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
folder=${1:-$here/.tools}
packages="prometheus prometheus-alertmanager"
programs="prometheus promtool alertmanager amtool"
# The four programs under the names they have in the packages.
files="usr/bin/prometheus usr/bin/promtool usr/bin/prometheus-alertmanager usr/bin/amtool"
work=

clean_up() {
    [ -z "$work" ] || rm -rf -- "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

give_up() {
    echo "No Prometheus and Alertmanager here ($1): going on without them."
    [ "${CI:-}" != true ] || exit 1
    exit 0
}

complete() {
    for program in $programs; do
        [ -x "$1/bin/$program" ] || return 1
    done
}

on_path() {
    for program in prometheus promtool amtool; do
        command -v "$program" >/dev/null || return 1
    done
    command -v alertmanager >/dev/null || command -v prometheus-alertmanager >/dev/null
}

complete "$folder" && exit 0
on_path && exit 0
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || give_up "this system has no $tool"
done

# Beside the target, so that the last step is a rename within one file system.
work=$(mktemp -d "$folder.XXXXXX") || give_up "cannot write beside $folder"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/packages" "$work/tools/bin"

apt() {
    # The sandbox user could not write into a folder of ours; other users' sources may be slow or gone, so don't insist.
    apt-get -q \
        -o Dir::State="$work/state" -o Dir::State::Lists="$work/state/lists" \
        -o Dir::Cache="$work/cache" -o Dir::Cache::Archives="$work/cache/archives" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none \
        -o Acquire::Retries=2 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 \
        "$@" </dev/null >>"$work/log" 2>&1
}

echo "Fetching Prometheus and Alertmanager from the Debian archive into $folder"
# One unreachable source makes `update` fail though the archive's lists are there: the download tells.
apt update
# shellcheck disable=SC2086  # two names
(cd "$work/packages" && apt download $packages) || give_up "apt-get: $(grep '^E:' "$work/log" | tail -n 1)"

for package in "$work"/packages/*.deb; do
    dpkg-deb -x "$package" "$work/tools/root" || give_up "cannot unpack $(basename "$package")"
done
set -- $files
for program in $programs; do
    ln -s "../root/$1" "$work/tools/bin/$program"
    missing=$(ldd "$work/tools/bin/$program" 2>&1 | grep 'not found')
    [ -z "$missing" ] || give_up "$program needs a library that is not here:$missing"
    "$work/tools/bin/$program" --version >/dev/null 2>&1 || give_up "$program does not start"
    shift
done

chmod 755 "$work/tools"
# Another `make` may have been quicker, which is as good; what an older version left is replaced.
complete "$folder" || { rm -rf -- "$folder" && mv -- "$work/tools" "$folder"; } || give_up "cannot write $folder"
