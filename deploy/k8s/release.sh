# What backup.sh and restore.sh know of a release, whose name is in $release. They source it.
read -ra kubectl <<<"${KUBECTL:-kubectl}"

part() { echo "app.kubernetes.io/instance=$release,app.kubernetes.io/component=$1"; }

# A pod of the part that is ready and was not asked to end: "pod/NAME", or nothing.
ready_pod() {
  "${kubectl[@]}" get pods -l "$(part "$1")" -o jsonpath='{range .items[*]}{.metadata.name}{" "}{.metadata.deletionTimestamp}{" "}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}' |
    awk 'NF == 2 && $2 == "True" && !found++ {print "pod/" $1}'
}

# NAME=REPLICAS of each deployment that the selector finds.
replicas() {
  "${kubectl[@]}" get deployments -l "$1" -o jsonpath='{range .items[*]}{.metadata.name}={.spec.replicas}{"\n"}{end}'
}

# Asks again for a while: a release is not left stopped because the API server was away for a moment.
scale() {
  for _ in 1 2 3 4 5 6; do
    "${kubectl[@]}" scale deployment "$1" --replicas="$2" && return 0
    sleep 5
  done
  return 1
}

# Waits until no pod is left that the selector finds. A question without an answer does not say that none is.
gone() {
  local found
  for _ in $(seq 900); do
    found=$("${kubectl[@]}" get pods -l "$1" -o name) || found=unknown
    [ -n "$found" ] || return 0
    sleep 1
  done
  echo "pods of $1 do not end" >&2
  return 1
}
