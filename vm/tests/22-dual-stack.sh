# Dual-stack: pods, Services of both IP families, a node port, DNS and a NetworkPolicy, in a separate cluster.
cleanup() {
    guest 'systemctl stop skiff; skiff reset --stop --yes --data-dir /var/lib/skiff-dual >/dev/null 2>&1
        rm -rf /etc/systemd/system/skiff.service.d /var/lib/skiff-dual /root/dual.kubeconfig; ip link del dual0
        systemctl daemon-reload; systemctl start skiff' >/dev/null 2>&1 || true
    mv "$GUEST_DIR/kubeconfig.single" "$GUEST_DIR/kubeconfig" 2>/dev/null || true
    guest_is_back
}
trap cleanup EXIT
cp "$GUEST_DIR/kubeconfig" "$GUEST_DIR/kubeconfig.single"
guest 'skiff stop && ip link add dual0 type dummy && ip addr add fd00:6::1/64 dev dual0 nodad && ip link set dual0 up
    node_ip=$(ip -4 -o route get 192.0.2.1 | sed "s/.* src \([^ ]*\).*/\1/")
    mkdir -p /etc/systemd/system/skiff.service.d && cat >/etc/systemd/system/skiff.service.d/dual.conf <<END
[Service]
ExecStart=
ExecStart=/usr/local/bin/skiff server --data-dir /var/lib/skiff-dual --write-kubeconfig /root/dual.kubeconfig --node-ip $node_ip,fd00:6::1 --cluster-cidr 10.42.0.0/16,fd00:42::/56 --service-cidr 10.43.0.0/16,fd00:43::/112
END
    systemctl daemon-reload && systemctl start skiff'
fetch_dual_kubeconfig() {
    guest cat /root/dual.kubeconfig | sed "s#server: .*#server: https://127.0.0.1:$GUEST_API_PORT#" >"$GUEST_DIR/kubeconfig.new"
    grep -q client-key-data "$GUEST_DIR/kubeconfig.new" && mv "$GUEST_DIR/kubeconfig.new" "$GUEST_DIR/kubeconfig"
}
eventually 120 fetch_dual_kubeconfig
eventually 120 node_is_ready
guest skiff image import /root/busybox.tar >/dev/null

k create ns dual
web web 2 dual
k patch -n dual svc web -p '{"spec":{"ipFamilyPolicy":"RequireDualStack","type":"NodePort"}}'
k rollout status -n dual deployment/web --timeout 180s
for name in friend stranger; do
    pod $name dual -- sleep 3600
    k wait -n dual pod/$name --for condition=Ready --timeout 120s
done
k label -n dual pod friend role=friend
address() { k get -n dual "$1" -o "jsonpath={$2}"; }
ip4=$(address svc/web '.spec.clusterIPs[0]') ip6=$(address svc/web '.spec.clusterIPs[1]')
case $ip6 in fd00:43:*) ;; *) fail "the second ClusterIP is '$ip6'" ;; esac
first=$(k get -n dual pod -l app=web -o 'jsonpath={.items[0].metadata.name}')
pod6=$(address "pod/$first" '.status.podIPs[1].ip')
case $pod6 in fd00:42:*) ;; *) fail "the second address of a pod is '$pod6'" ;; esac
get() { k exec -n dual "$1" -- timeout 5 wget -qO- "http://$2"; }
refused() { ! get "$@"; }

# busybox httpd listens on both IP families.
eventually 60 get friend "[$pod6]:8080"
eventually 60 get friend "[$ip6]"
get friend "$ip4"
answers=$(k exec -n dual friend -- sh -c "for i in \$(seq 20); do timeout 5 wget -qO- 'http://[$ip6]' || echo LOST; done" | sort -u)
[ "$(echo "$answers" | wc -l)" = 2 ] || fail "endpoints that answered: $answers"
case $answers in *LOST*) fail "connections were lost: $answers" ;; esac
k exec -n dual friend -- timeout 5 nslookup -type=aaaa web.dual.svc.cluster.local | grep -F "$ip6"
node_port=$(address svc/web '.spec.ports[0].nodePort')
eventually 30 guest curl -sf -m 5 "http://[fd00:6::1]:$node_port"
eventually 30 get friend "[fd00:6::1]:$node_port"

k apply -n dual -f - <<END
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {role: friend}}}]
END
eventually 30 refused stranger "[$pod6]:8080"
refused stranger "[$ip6]" || fail "a stranger passes by the Service"
get friend "[$ip6]"
