# Functions for the tests in vm/tests; see vm/README.md. Sourced on the host, with `set -eu`.
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export GUEST_DIR=${GUEST_DIR:-$HOME/.cache/skiff/guest} GUEST_PORT=${GUEST_PORT:-2222}
export GUEST_API_PORT=${GUEST_API_PORT:-16443}
IMAGE=test/busybox:1

guest() { "$vm/guest" run "$@"; }
k() { kubectl --kubeconfig "$GUEST_DIR/kubeconfig" --request-timeout 60s "$@"; }
fail() { echo "FAILED: $*" >&2; exit 1; }

# eventually SECONDS COMMAND...: repeats the command until it succeeds; fails after the timeout.
eventually() {
    local deadline=$((SECONDS + $1)) output; shift
    until output=$("$@" 2>&1); do
        [ $SECONDS -lt $deadline ] || fail "gave up on: $* (last output: $output)"
        sleep 1
    done
}

# expect EXPECTED COMMAND...: fails unless the output of the command is exactly EXPECTED.
expect() {
    local wanted=$1 got; shift
    got=$("$@" 2>&1) || fail "$*: $got"
    [ "$got" = "$wanted" ] || fail "$*: wanted '$wanted', got '$got'"
}

# field OBJECT JSONPATH EXPECTED: whether a field has this value; for use with eventually.
field() {
    local got
    got=$(k get $1 -o "jsonpath=$2") && echo "$1 $2 is '$got', wanted '$3'" && [ "$got" = "$3" ]
}

# pod NAME [NAMESPACE] -- COMMAND...: creates a busybox pod that runs the command.
pod() {
    local name=$1 namespace=default; shift
    [ "$1" = -- ] || { namespace=$1; shift; }
    shift
    k run "$name" -n "$namespace" --image "$IMAGE" --restart Never --command -- "$@"
}

# web NAME REPLICAS [NAMESPACE]: creates a Deployment and its Service; port 80 responds with the name of the pod.
web() {
    k apply -n "${3:-default}" -f - <<EOF
apiVersion: apps/v1
kind: Deployment
metadata: {name: $1}
spec:
  replicas: $2
  selector: {matchLabels: {app: $1}}
  template:
    metadata: {labels: {app: $1}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: web
        image: $IMAGE
        command: [sh, -c, "mkdir /www && hostname > /www/index.html && exec httpd -f -p 8080 -h /www"]
        readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: $1}
spec:
  selector: {app: $1}
  ports: [{port: 80, targetPort: 8080}]
EOF
}

node_is_ready() { [ "$(k get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}')" = True ]; }
guest_is_back() { eventually 240 node_is_ready; }
guest_reboot() { "$vm/guest" reboot; guest_is_back; }
guest_cut() { "$vm/guest" cut up; guest_is_back; }

# Fetches the kubeconfig that the server wrote, with the address that is used outside of the guest.
fetch_kubeconfig() {
    guest cat /root/.kube/config | sed "s#server: .*#server: https://127.0.0.1:$GUEST_API_PORT#" >"$GUEST_DIR/kubeconfig.new"
    grep -q client-key-data "$GUEST_DIR/kubeconfig.new" || return 1
    mv "$GUEST_DIR/kubeconfig.new" "$GUEST_DIR/kubeconfig"
}
