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

mkdir -p "$target"
gateway=$(ready_pod gateway)
redis=$(ready_pod redis)
[ -n "$gateway" ] && [ -n "$redis" ] || { echo "backup: $release has no gateway or no Redis that is ready" >&2; exit 1; }
trainers=$(replicas "$(part trainer)")
restart() { for one in $trainers; do scale "${one%=*}" "${one#*=}" || echo "backup: ${one%=*} had ${one#*=} replicas" >&2; done; }
trap restart EXIT
for one in $trainers; do scale "${one%=*}" 0; done
gone "$(part trainer)"

# Models from hubs are not in it: they are downloaded again.
# Status 1 of tar: a file went while it was read.
archive() {
  "${kubectl[@]}" exec "$gateway" -c gateway -- sh -c "cd /data && { tar --exclude=./huggingface --exclude=./staging \
    --exclude=./run $1 -cf - . || [ \$? = 1 ]; }"
}
in_redis() { "${kubectl[@]}" exec "$redis" -c redis -- sh -c "$1"; }
began=$("${kubectl[@]}" exec "$gateway" -c gateway -- date +%s)
archive "" >"$target/data.tar.part"
in_redis 'redis-cli --rdb /data/backup.rdb >&2 && cat /data/backup.rdb && rm /data/backup.rdb' >"$target/redis.rdb.part"
# The memory that the dump takes when it is loaded: a restore asks for it beforehand.
in_redis 'redis-cli info memory' | tr -d '\r' | sed -n 's/^used_memory://p' >"$target/redis.bytes.part"
# Copies that a gateway made of a checkpoint meanwhile.
archive "--newer=@$began" >"$target/later.tar.part"
[ "$(head -c 5 "$target/redis.rdb.part")" = REDIS ] && [ -s "$target/redis.bytes.part" ] ||
  { echo "backup: Redis gave no dump" >&2; exit 1; }
for name in data.tar later.tar redis.rdb redis.bytes; do mv "$target/$name.part" "$target/$name"; done
echo "backed up $release to $target"
