# A host with several addresses and a VPN interface that takes over the default route: the node address does not change on
# a restart, node ports respond on every address, and pods reach Services and the API server.
cleanup() {
    k delete ns addresses --wait=false >/dev/null 2>&1 || true
    guest 'ip route del 0.0.0.0/1 dev wg0; ip route del 128.0.0.0/1 dev wg0; ip link del wg0; ip link del second0
        systemctl restart skiff' >/dev/null 2>&1 || true
    guest_is_back
}
trap cleanup EXIT
node_ip() { k get nodes -o 'jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}'; }
before=$(node_ip)
k create ns addresses
web web 1 addresses
k patch -n addresses svc web -p '{"spec":{"type":"NodePort"}}'
k rollout status -n addresses deployment/web --timeout 180s
pod client addresses -- sleep 3600
k wait -n addresses pod/client --for condition=Ready --timeout 120s
ip=$(k get -n addresses svc web -o 'jsonpath={.spec.clusterIP}')
node_port=$(k get -n addresses svc web -o 'jsonpath={.spec.ports[0].nodePort}')
get() { k exec -n addresses client -- timeout 5 wget -qO- "http://$1" >/dev/null; }
works() {
    get "$ip" && get web.addresses.svc.cluster.local && get "$before:$node_port" && get "10.98.0.1:$node_port" &&
        guest curl -sf -m 5 "http://10.99.0.1:$node_port" && guest curl -sf -m 5 "http://10.98.0.1:$node_port" &&
        k exec -n addresses client -- sh -c 'timeout 5 nc $KUBERNETES_SERVICE_HOST 443 </dev/null'
}
eventually 60 get "$ip"
# The routes that wg-quick and OpenVPN create: two halves that are more specific than the default route, with the VPN's
# address as source.
guest 'ip link add wg0 type wireguard && ip addr add 10.99.0.1/24 dev wg0 && ip link set wg0 up
    ip link add second0 type dummy && ip addr add 10.98.0.1/24 dev second0 && ip link set second0 up
    gateway=$(ip -4 route show default | sed "s/.* via \([^ ]*\).*/\1/")
    ip route add "$gateway" dev "$(ip -4 -o route show default | sed "s/.* dev \([^ ]*\).*/\1/")" 2>/dev/null
    ip route add 0.0.0.0/1 dev wg0 && ip route add 128.0.0.0/1 dev wg0'
eventually 60 works
guest systemctl restart skiff
guest_is_back
eventually 60 works
expect "$before" node_ip
