# With ufw, installed and enabled while skiff runs: its INPUT policy DROP blocks pods neither from DNS nor from the
# kubernetes Service, and still blocks everything else. The same after a reload.
install() { GUEST_TIMEOUT=600 guest "export DEBIAN_FRONTEND=noninteractive; (apt-get update && apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io $*) >/root/apt.log 2>&1"; }
cleanup() {
    k delete ns ufw --wait=false >/dev/null 2>&1 || true
    GUEST_TIMEOUT=300 guest 'ufw --force disable; apt-get purge -y -q ufw >/dev/null 2>&1
        for table in "ip filter" "ip6 filter"; do nft delete table $table; done' >/dev/null 2>&1 || true
}
trap cleanup EXIT
k create ns ufw
web web 1 ufw
k rollout status -n ufw deployment/web --timeout 180s
pod client ufw -- sleep 3600
k wait -n ufw pod/client --for condition=Ready --timeout 120s
in_client() { k exec -n ufw client -- timeout 10 "$@"; }
ip=$(k get -n ufw svc web -o 'jsonpath={.spec.clusterIP}')
api=$(k get svc kubernetes -o 'jsonpath={.spec.clusterIP}')
node=$(k get nodes -o 'jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}')

install ufw || { guest tail -3 /root/apt.log; echo "skipped: ufw cannot be installed"; exit 0; }
# Access to ssh and to the API server from outside is opened by the administrator.
guest 'ufw allow 22/tcp && ufw allow 6443/tcp && ufw --force enable'
dropping() { guest iptables -S | grep -q -- '-P INPUT DROP'; }
eventually 30 dropping
works() {
    in_client wget -qO- "http://$ip" >/dev/null && in_client nslookup kubernetes.default.svc.cluster.local >/dev/null &&
        in_client nc -w 5 "$api" 443 </dev/null && in_client nc -w 5 "$node" 10250 </dev/null
}
eventually 60 works
# Other sources remain blocked: the ACCEPT rules of skiff match only the pod CIDR or a mark.
others=$(guest 'iptables -S SKIFF-INPUT; iptables -S SKIFF-FORWARD')
! echo "$others" | grep -E -- '-j ACCEPT' | grep -vE -- '-[sd] 10\.42\.0\.0/16|--mark' || fail "too much is accepted: $others"
guest skiff check | grep -F 'host firewall' | grep -q '^ok' || fail "$(guest skiff check | grep -A1 'host firewall')"
guest ufw reload
eventually 30 dropping
eventually 60 works
