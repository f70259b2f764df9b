#!/usr/bin/env bash
# Makes sure that redis-server, nginx, systemd and Node.js are installed, which some tests start for themselves
# (systemd as a manager of their own user, not of the machine). Where they can't be, one line says so, and those
# tests are skipped (or fail, with PAGEFLEET_FORBID_SKIP=1).
set -u

declare -A packages=([redis-server]=redis-server [nginx]=nginx-light [systemctl]=systemd [node]=nodejs [npm]=npm)
missing=()
for program in redis-server nginx systemctl node npm; do
    command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || missing+=("${packages[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "services: ${missing[*]} not installed, and this user can't install them; tests that need them are skipped"
    exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >>"$log" 2>&1
}
if ! install && ! { apt-get update -q >>"$log" 2>&1 && install; }; then
    echo "services: installing ${missing[*]} failed; tests that need them are skipped. Last lines:"
    tail -n 3 "$log"
fi
exit 0
