#!/usr/bin/env bash
# Backs up a release: its volume and its bundled Redis, together.
#
#   deploy/k8s/backup.sh RELEASE DIRECTORY        writes DIRECTORY/data.tar, later.tar, redis.rdb and redis.bytes
#
# KUBECTL is the command to use (default: kubectl, with the namespace of the current context).
#
# Trainers are stopped for its duration, and what clients ask of them waits; samples go on. The volume is copied before
# Redis: without trainers hardly a file is new meanwhile, what is new is copied afterwards, and gateways delete a record
# before its files. So whatever Redis speaks of is among the files. What was accepted meanwhile is in its journal.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
release=$1 target=$2
. "$(dirname "$0")/release.sh"

# Whoever reads a backup reads what everybody trained.
umask 077
mkdir -p "$target"
gateway=$(ready_pod gateway)
redis=$(ready_pod redis)
[ -n "$gateway" ] && [ -n "$redis" ] || { echo "backup: $release has no gateway or no Redis that is ready" >&2; exit 1; }
trainers=$(replicas "$(part trainer)")
restart() {
  local status=$? one
  trap '' INT TERM HUP
  trap - EXIT
  for one in $trainers; do
    scale "${one%=*}" "${one#*=}" && continue
    echo "backup: ${one%=*} is stopped still: ${kubectl[*]} scale deployment ${one%=*} --replicas=${one#*=}" >&2
    status=1
  done
  exit "$status"
}
trap restart EXIT
trap 'exit 1' INT TERM HUP
for one in $trainers; do
  [ "${one#*=}" != 0 ] || echo "backup: ${one%=*} has no replicas, and is left so" >&2
  scale "${one%=*}" 0
done
gone "$(part trainer)"

# Models from hubs are not in it: they are downloaded again. Nor is the volume's own directory, whose mode is for its
# owner to set, who a restore is not; nor what a file system keeps in it.
# Status 1 of tar: a file went while it was read.
archive() {
  "${kubectl[@]}" exec "$gateway" -c gateway -- sh -c "cd /data && { find . -mindepth 1 -maxdepth 1 -print0 |
    tar --exclude=./huggingface --exclude=./staging --exclude=./run --exclude=./lost+found $1 -cf - --null -T - ||
    [ \$? = 1 ]; }"
}
in_redis() { "${kubectl[@]}" exec "$redis" -c redis -- sh -c "$1"; }
# Since when files are new, by the volume's clock: that of a directory which is being written, and gets its name only when
# it is whole, has files that are older than now.
began=$("${kubectl[@]}" exec "$gateway" -c gateway -- sh -c 'cd /data && mark=$(mktemp .backup-XXXXXX) && {
  stat -c %Z "$mark"
  find . -path ./huggingface -prune -o -type d -name ".*-????????" -exec find {} -type f -printf "%C@\n" ";" | cut -d. -f1
} | sort -n | head -n 1; rm -f "$mark"')
archive "" >"$target/data.tar.part"
in_redis 'trap "rm -f /data/backup.rdb" EXIT; redis-cli --rdb /data/backup.rdb >&2 && cat /data/backup.rdb' \
  >"$target/redis.rdb.part"
# The memory that the dump takes when it is loaded: a restore asks for it beforehand.
in_redis 'redis-cli info memory' | tr -d '\r' | sed -n 's/^used_memory://p' >"$target/redis.bytes.part"
# Copies that a gateway made of a checkpoint meanwhile.
archive "--newer=@$began" >"$target/later.tar.part"

# A stream that broke off may look like one that ended: each has an end to be known by.
for name in data later; do
  tar -tf "$target/$name.tar.part" >/dev/null || { echo "backup: the copy of the volume is not whole" >&2; exit 1; }
done
case $(head -c 6 "$target/redis.rdb.part" | tr -d '\0') in REDIS* | VALKEY) whole=yes ;; *) whole=no ;; esac
# The mark of the end, before eight bytes of a checksum.
[ "$(tail -c 9 "$target/redis.rdb.part" | head -c 1 | od -An -tx1 | tr -d ' \n')" = ff ] || whole=no
[ $whole = yes ] && [ -s "$target/redis.bytes.part" ] || { echo "backup: Redis gave no whole dump" >&2; exit 1; }
for name in data.tar later.tar redis.rdb redis.bytes; do mv "$target/$name.part" "$target/$name"; done
echo "backed up $release to $target"
