#!/usr/bin/env bash
# Restores what backup.sh wrote into a release that has nothing of its own yet.
#
#   deploy/k8s/restore.sh RELEASE DIRECTORY
#
# Install the release first, with the values that it had. KUBECTL as for backup.sh.
#
# Trainers, samplers and gateways are stopped, files come first and then Redis, which copies the dump from a second server
# beside it, as a replica does, so that its append-only file has everything before it is used. Its container holds the data
# twice meanwhile. What fails leaves them stopped, so that none serves a part of the backup, and says how to go on.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
release=$1 source=$2
. "$(dirname "$0")/release.sh"
for name in data.tar later.tar redis.rdb redis.bytes; do
  [ -s "$source/$name" ] || { echo "restore: no backup in $source: $name is missing or empty" >&2; exit 1; }
done

redis=$(ready_pod redis)
[ -n "$redis" ] || { echo "restore: $release has no Redis that is ready" >&2; exit 1; }
# A gateway has the volume mounted; it is stopped last.
gateway=$(ready_pod gateway)
[ -n "$gateway" ] || { echo "restore: $release has no gateway that is ready" >&2; exit 1; }
in_redis() { "${kubectl[@]}" exec -i "$redis" -c redis -- sh -c "$1"; }
if [ "$(in_redis 'redis-cli exists tinsmith:session-life tinsmith:parked-sessions tinsmith:over-sessions' </dev/null)" != 0 ]; then
  echo "restore: this release has sessions of its own, which would be lost" >&2
  exit 1
fi

# Twice the data, an eighth of it for fragmentation and pages that are written while a file is, and the servers themselves.
bytes=$(cat "$source/redis.bytes")
needed=$((bytes * 9 / 4 + 64 * 1024 * 1024))
maxmemory=$(in_redis 'redis-cli info memory' </dev/null | tr -d '\r' | sed -n 's/^maxmemory://p')
limit=$(in_redis 'cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || echo max' </dev/null)
if [ "$maxmemory" -gt 0 ] && [ "$bytes" -gt "$maxmemory" ]; then
  echo "restore: the backup's Redis used $bytes bytes and maxmemory is $maxmemory: raise redis.maxmemory and its memory limit" >&2
  exit 1
fi
if [ "$limit" != max ] && [ "$needed" -gt "$limit" ]; then
  echo "restore: Redis needs $needed bytes while it is restored and its container may have $limit: raise" \
    "redis.resources.limits.memory, and lower it again afterwards" >&2
  exit 1
fi

# KEDA starts samplers again that somebody else has stopped.
scaled=$("${kubectl[@]}" get scaledobjects.keda.sh -l "app.kubernetes.io/instance=$release" -o name 2>/dev/null || true)
if [ -n "$scaled" ]; then
  echo "restore: samplers are scaled by KEDA: install the release without sampler.autoscaling, and set it afterwards" >&2
  exit 1
fi

deployments=$(replicas "app.kubernetes.io/instance=$release,app.kubernetes.io/component in (gateway,trainer,sampler)")
failed() {
  trap '' INT TERM HUP
  trap - EXIT
  in_redis '
    redis-cli replicaof no one
    env -u REDISCLI_AUTH redis-cli -p 6380 shutdown nosave
    rm -f /data/restore.rdb
  ' </dev/null >/dev/null 2>&1 || true
  {
    echo "restore: it failed. $release stays stopped, for its Redis and its volume may have a part of the backup only."
    echo "Mend the cause, empty Redis, start the release as it was, and restore again when a gateway is ready:"
    echo "  ${kubectl[*]} exec $redis -c redis -- sh -c 'redis-cli replicaof no one && redis-cli flushall'"
    for one in $deployments; do echo "  ${kubectl[*]} scale deployment ${one%=*} --replicas=${one#*=}"; done
    echo "  $0 $release $source"
  } >&2
  exit 1
}
trap failed EXIT
trap 'exit 1' INT TERM HUP
for one in $deployments; do
  case $one in *-gateway=*) ;; *) scale "${one%=*}" 0 ;; esac
done
others="app.kubernetes.io/instance=$release,app.kubernetes.io/component in (trainer,sampler)"
gone "$others"
for archive in data later; do
  "${kubectl[@]}" exec -i "$gateway" -c gateway -- \
    tar -C /data --no-same-owner --no-overwrite-dir -xf - <"$source/$archive.tar"
done
for one in $deployments; do
  case $one in *-gateway=*) scale "${one%=*}" 0 ;; esac
done
gone "$(part gateway)"

in_redis 'cat >/data/restore.rdb' <"$source/redis.rdb"
in_redis </dev/null '
  set -e
  info() { redis-cli info "$1" | tr -d "\r" | grep "^$2:" | cut -d: -f2; }
  redis-server --port 6380 --bind 127.0.0.1 --dir /data --dbfilename restore.rdb --appendonly no --save "" \
    --daemonize yes --pidfile /tmp/restore.pid --logfile /tmp/restore.log
  beside() { env -u REDISCLI_AUTH redis-cli -p 6380 "$@"; }
  # A line now and then: proxies before API servers end connections on which nothing is said.
  pause() { sleep 1; [ $(($1 % 20)) != 0 ] || echo "waiting for Redis, $1 s"; }
  for second in $(seq 600); do
    [ "$(beside ping 2>/dev/null)" = PONG ] && break
    pause "$second"
    kill -0 "$(cat /tmp/restore.pid)" || break
  done
  [ "$(beside ping)" = PONG ] || { tail /tmp/restore.log >&2; exit 1; }
  redis-cli replicaof 127.0.0.1 6380
  for second in $(seq 3600); do [ "$(info replication master_link_status)" = up ] && break; pause "$second"; done
  written() { redis-cli info persistence | tr -d "\r" | grep -qx "$1"; }
  for second in $(seq 3600); do
    written aof_rewrite_in_progress:0 && written aof_rewrite_scheduled:0 && break; pause "$second"
  done
  written aof_last_bgrewrite_status:ok
  [ "$(info replication master_link_status)" = up ]
  redis-cli replicaof no one
  beside shutdown nosave || true
  rm -f /data/restore.rdb
'
trap '' INT TERM HUP
trap - EXIT
status=0
for one in $deployments; do
  scale "${one%=*}" "${one#*=}" && continue
  echo "restore: everything is restored, but ${one%=*} is stopped still:" \
    "${kubectl[*]} scale deployment ${one%=*} --replicas=${one#*=}" >&2
  status=1
done
[ $status = 0 ] || exit 1
echo "restored $release from $source"
