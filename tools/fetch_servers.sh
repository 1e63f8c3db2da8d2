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
version=$(cksum <"$0")
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

# Made whole, and by this version of this script.
complete() {
    [ "$(cat "$folder/made-by" 2>/dev/null)" = "$version" ]
}

on_path() {
    for program in prometheus promtool amtool; do
        command -v "$program" >/dev/null || return 1
    done
    command -v alertmanager >/dev/null || command -v prometheus-alertmanager >/dev/null
}

complete && exit 0
on_path && exit 0
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || give_up "this system has no $tool"
done

# Beside the target, so that the last step is a rename within one file system.
work=$(mktemp -d "$folder.XXXXXX") || give_up "cannot write beside $folder"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/packages" "$work/tools/bin"

apt() {
    # apt as root would drop to a user who cannot write here; sources that are slow or gone must not hold us up.
    apt-get -q \
        -o Dir::State="$work/state" -o Dir::State::Lists="$work/state/lists" \
        -o Dir::Cache="$work/cache" -o Dir::Cache::Archives="$work/cache/archives" \
        -o APT::Sandbox::User=root -o Acquire::Languages=none \
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
for program in $programs; do
    ln -s "../root/usr/bin/$program" "$work/tools/bin/$program"
done

# Debian's Alertmanager reads its templates from a folder that only an installed package has. This one is led to an open
# directory instead, by a path of the same length; a wrapper opens the directory.
installed=/usr/share/prometheus/alertmanager
opened=/proc/self/fd/9///////////////////
alertmanager=$work/tools/root/usr/bin/prometheus-alertmanager
LC_ALL=C sed "s|$installed|$opened|g" "$alertmanager" >"$work/alertmanager" || give_up "cannot adapt alertmanager"
cat "$work/alertmanager" >"$alertmanager"
rm -f "$work/tools/bin/alertmanager"
cat >"$work/tools/bin/alertmanager" <<EOF
#!/bin/sh
root=\$(CDPATH='' cd -- "\$(dirname -- "\$0")/../root" && pwd) || exit 1
exec 9<"\$root$installed" "\$root/usr/bin/prometheus-alertmanager" "\$@"
EOF
chmod 755 "$work/tools/bin/alertmanager"

for program in $programs; do
    "$work/tools/bin/$program" --version >"$work/version" 2>&1 ||
        give_up "$program does not start: $(head -n 1 "$work/version")"
done

chmod 755 "$work/tools"
echo "$version" >"$work/tools/made-by"
# Another `make` may have been quicker, which is as good; what an older version left is replaced.
complete || { rm -rf -- "$folder" && mv -- "$work/tools" "$folder"; } || give_up "cannot write $folder"
