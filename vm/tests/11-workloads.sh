# A Deployment with its Service and DNS names; exec, logs, port-forward; a Job.
k create ns workloads
web front 2 workloads
k rollout status -n workloads deployment/front --timeout 180s
pod client workloads -- sleep 3600
k wait -n workloads pod/client --for condition=Ready --timeout 120s

in_client() { k exec -n workloads client -- "$@"; }
eventually 30 in_client timeout 5 wget -qO- http://front
eventually 30 in_client timeout 5 wget -qO- http://front.workloads.svc.cluster.local
in_client nslookup kubernetes.default.svc.cluster.local
# Several requests by DNS name, so that both endpoints, which are on the node of the client, are used.
for _ in 1 2 3 4 5 6; do in_client timeout 5 wget -qO- http://front; done | sort | uniq -c

expect hello k exec -n workloads client -- echo hello
expect "$(printf 'from stdin')" bash -c 'echo from stdin | kubectl --kubeconfig "$1" exec -i -n workloads client -- cat' - "$GUEST_DIR/kubeconfig"
if k exec -n workloads client -- sh -c 'exit 7'; then fail "the exit code of exec is lost"; else expect 7 echo $?; fi

k create job -n workloads count --image "$IMAGE" -- sh -c 'for i in 1 2 3; do echo line $i; done'
k wait -n workloads job/count --for condition=Complete --timeout 120s
expect "$(printf 'line 1\nline 2\nline 3')" k logs -n workloads job/count

k port-forward -n workloads svc/front 18080:80 >"$GUEST_DIR/port-forward" 2>&1 &
forward=$!
trap 'kill $forward 2>/dev/null || true' EXIT
eventually 30 curl -sf -m 5 http://127.0.0.1:18080
k delete ns workloads --wait=false
