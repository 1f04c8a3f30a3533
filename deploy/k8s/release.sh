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

scale() { "${kubectl[@]}" scale deployment "$1" --replicas="$2"; }

# Waits until no pod is left that the selector finds.
gone() {
  for _ in $(seq 900); do
    [ -z "$("${kubectl[@]}" get pods -l "$1" -o name)" ] && return
    sleep 1
  done
  echo "pods of $1 do not end" >&2
  return 1
}
