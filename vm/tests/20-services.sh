# Services between pods of one node, without br_netfilter: by ClusterIP, DNS name, node port and host port, from a pod to
# itself, with session affinity, to a terminating endpoint; then restores removed links, rules and routes.
k create ns services
cleanup() { k delete ns services --wait=false >/dev/null 2>&1 || true; }
trap cleanup EXIT
guest '! lsmod | grep -q br_netfilter' || fail 'br_netfilter is loaded'

web web 2 services
web one 1 services
k rollout status -n services deployment/web --timeout 180s
k rollout status -n services deployment/one --timeout 180s
pod client services -- sleep 3600
k wait -n services pod/client --for condition=Ready --timeout 120s
in_client() { k exec -n services client -- "$@"; }
get() { timeout 60 kubectl --kubeconfig "$GUEST_DIR/kubeconfig" exec -n services client -- timeout 5 wget -qO- "http://$1"; }
ip_of() { k get -n services svc "$1" -o 'jsonpath={.spec.clusterIP}'; }
pod_of() { k get -n services pod -l "app=$1" -o "jsonpath={.items[0].$2}"; }

# From pod to pod, and through a ClusterIP: each of many connections succeeds, and every endpoint responds.
eventually 60 get "$(pod_of one status.podIP):8080"
web_ip=$(ip_of web)
eventually 60 get "$web_ip"
answers=$(in_client sh -c "for i in \$(seq 20); do timeout 5 wget -qO- http://$web_ip || echo LOST; done" | sort -u)
[ "$(echo "$answers" | wc -l)" = 2 ] || fail "endpoints that answered: $answers"
case $answers in *LOST*) fail "connections were lost: $answers" ;; esac
get web.services.svc.cluster.local

# A pod reaches itself through its Service (hairpin).
one=$(pod_of one metadata.name) one_ip=$(ip_of one)
expect "$one" k exec -n services "$one" -- timeout 5 wget -qO- "http://$one_ip"

# Session affinity: all connections use the same endpoint.
k patch -n services svc web -p '{"spec":{"sessionAffinity":"ClientIP"}}'
same() { [ "$(in_client sh -c "for i in \$(seq 10); do timeout 5 wget -qO- http://$web_ip; done" | sort -u | wc -l)" = 1 ]; }
eventually 30 same

# A node port and a host port, from the node and from a pod.
k patch -n services svc one -p '{"spec":{"type":"NodePort"}}'
node_port=$(k get -n services svc one -o 'jsonpath={.spec.ports[0].nodePort}')
node_ip=$(k get nodes -o 'jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}')
eventually 30 guest curl -sf -m 5 "http://$node_ip:$node_port"
eventually 30 get "$node_ip:$node_port"
k patch -n services deployment one --type json -p '[{"op":"add","path":"/spec/template/spec/containers/0/ports","value":[{"containerPort":8080,"hostPort":18099}]},{"op":"add","path":"/spec/strategy","value":{"type":"Recreate"}}]'
k rollout status -n services deployment/one --timeout 180s
eventually 60 guest curl -sf -m 5 "http://$node_ip:18099"
eventually 30 guest curl -sf -m 5 http://127.0.0.1:18099
eventually 30 get "$node_ip:18099"

# A terminating endpoint serves as long as there is no ready one.
k apply -n services -f - <<EOF
apiVersion: v1
kind: Pod
metadata: {name: last, labels: {app: last}}
spec:
  terminationGracePeriodSeconds: 60
  containers:
  - name: web
    image: $IMAGE
    command: [sh, -c, "trap 'sleep 25; exit 0' TERM; mkdir /www && echo last > /www/index.html && httpd -p 8080 -h /www; while true; do sleep 1; done"]
    readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: last}
spec:
  selector: {app: last}
  ports: [{port: 80, targetPort: 8080}]
EOF
k wait -n services pod/last --for condition=Ready --timeout 120s
last_ip=$(ip_of last)
eventually 30 get "$last_ip"
k delete -n services pod last --wait=false
eventually 20 sh -c "kubectl --kubeconfig '$GUEST_DIR/kubeconfig' get endpointslices -n services -l kubernetes.io/service-name=last -o jsonpath='{.items[*].endpoints[*].conditions.terminating}' | grep -q true"
expect last get "$last_ip"

# Links, rules and routes that are removed are restored.
link=$(guest ip -o route get "$(pod_of one status.podIP)" | sed 's/.* dev \([^ ]*\) .*/\1/')
guest ip link del "$link"
eventually 30 get "$one_ip"
guest nft flush ruleset
eventually 30 get "$web_ip"
guest ip route flush root 10.42.0.0/16
eventually 30 get "$web_ip"
