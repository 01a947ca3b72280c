# NetworkPolicies between pods of one node.
k create ns policies
trap 'k delete ns policies --wait=false >/dev/null 2>&1 || true' EXIT
web web 1 policies
k rollout status -n policies deployment/web --timeout 180s
for name in friend stranger; do
    pod $name policies -- sleep 3600
    k wait -n policies pod/$name --for condition=Ready --timeout 120s
done
k label -n policies pod friend role=friend
web_pod=$(k get -n policies pod -l app=web -o 'jsonpath={.items[0].status.podIP}'):8080
web_ip=$(k get -n policies svc web -o 'jsonpath={.spec.clusterIP}')
get() { k exec -n policies "$1" -- timeout 3 wget -qO- "http://$2"; }
refused() { ! get "$@"; }
for who in friend stranger; do eventually 60 get $who "$web_ip"; get $who "$web_pod"; done

k apply -n policies -f - <<EOF
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {role: friend}}}]
EOF
eventually 30 refused stranger "$web_pod"
refused stranger "$web_ip" || fail "a stranger passes by the Service"
get friend "$web_pod"
get friend "$web_ip"
# The node always reaches its pods: probes depend on it.
guest curl -sf -m 5 "http://$web_pod"
k delete -n policies networkpolicy friends
eventually 30 get stranger "$web_ip"
