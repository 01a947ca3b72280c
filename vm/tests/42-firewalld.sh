# With firewalld, installed while skiff runs, reloaded and restarted, and active before skiff starts.
install() { GUEST_TIMEOUT=600 guest "export DEBIAN_FRONTEND=noninteractive; (apt-get update && apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io $*) >/root/apt.log 2>&1"; }
cleanup() {
    k delete ns firewalld --wait=false >/dev/null 2>&1 || true
    GUEST_TIMEOUT=300 guest 'systemctl disable -q --now firewalld; apt-get purge -y -q firewalld >/dev/null 2>&1; nft delete table inet firewalld' >/dev/null 2>&1 || true
}
trap cleanup EXIT
k create ns firewalld
web web 1 firewalld
k rollout status -n firewalld deployment/web --timeout 180s
pod client firewalld -- sleep 3600
k wait -n firewalld pod/client --for condition=Ready --timeout 120s
in_client() { k exec -n firewalld client -- timeout 10 "$@"; }
ip=$(k get -n firewalld svc web -o 'jsonpath={.spec.clusterIP}')
api=$(k get svc kubernetes -o 'jsonpath={.spec.clusterIP}')
node=$(k get nodes -o 'jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}')

install firewalld nftables python3-nftables || { guest tail -3 /root/apt.log; echo "skipped: firewalld cannot be installed"; exit 0; }
rejecting() { guest nft list chain inet firewalld filter_INPUT | grep -q reject; }
eventually 90 rejecting
# Access to the API server from outside is opened by the administrator.
guest 'firewall-cmd -q --permanent --add-port=6443/tcp && firewall-cmd -q --reload'
eventually 60 rejecting
works() {
    in_client wget -qO- "http://$ip" >/dev/null && in_client nslookup kubernetes.default.svc.cluster.local >/dev/null &&
        in_client nc -w 5 "$api" 443 </dev/null && in_client nc -w 5 "$node" 10250 </dev/null
}
eventually 60 works
guest skiff check | grep -F 'host firewall' | grep -q '^ok' || fail "$(guest skiff check | grep -A1 'host firewall')"
guest firewall-cmd -q --reload
eventually 60 rejecting
eventually 60 works
guest systemctl restart firewalld
eventually 90 rejecting
eventually 60 works
guest systemctl restart skiff
guest_is_back
eventually 60 works
