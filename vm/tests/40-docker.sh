# With Docker, installed while skiff runs: its FORWARD policy DROP does not block traffic between pods, before and after a
# restart of both.
install() { GUEST_TIMEOUT=600 guest "export DEBIAN_FRONTEND=noninteractive; (apt-get update && apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io $*) >/root/apt.log 2>&1"; }
cleanup() {
    k delete ns docker --wait=false >/dev/null 2>&1 || true
    GUEST_TIMEOUT=300 guest 'systemctl disable -q --now docker.socket docker containerd; apt-get purge -y -q docker.io >/dev/null 2>&1
        ip link del docker0; for table in "ip filter" "ip nat" "ip6 filter" "ip6 nat"; do nft delete table $table; done; rmmod br_netfilter' >/dev/null 2>&1 || true
}
trap cleanup EXIT
k create ns docker
web web 1 docker
k rollout status -n docker deployment/web --timeout 180s
pod client docker -- sleep 3600
k wait -n docker pod/client --for condition=Ready --timeout 120s
get() { k exec -n docker client -- timeout 5 wget -qO- "http://$1" >/dev/null; }
ip=$(k get -n docker svc web -o 'jsonpath={.spec.clusterIP}')
pod_ip=$(k get -n docker pod -l app=web -o 'jsonpath={.items[0].status.podIP}')
eventually 60 get "$ip"

install docker.io || { guest tail -3 /root/apt.log; echo "skipped: docker.io cannot be installed"; exit 0; }
# Docker sets the policy only if it enables forwarding itself, as it does when it is installed before skiff.
guest 'systemctl stop docker docker.socket; sysctl -qw net.ipv4.ip_forward=0; systemctl start docker'
dropping() { guest iptables -S FORWARD | grep -q -- '-P FORWARD DROP'; }
eventually 60 dropping
works() {
    get "$ip" && get "$pod_ip:8080" && get web.docker.svc.cluster.local &&
        k exec -n docker client -- timeout 5 nslookup kubernetes.default.svc.cluster.local >/dev/null
}
eventually 30 works
# Docker and iptables can still read their tables.
guest iptables-save >/dev/null
guest skiff check | grep -F 'host firewall' | grep -q '^ok' || fail "$(guest skiff check | grep -A1 'host firewall')"
guest systemctl restart docker
eventually 60 dropping
eventually 30 works
guest systemctl restart skiff
guest_is_back
eventually 60 works
guest iptables -F FORWARD
eventually 30 works
