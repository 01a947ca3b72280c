# podPidsLimit, set in a configuration file, is enforced by the pod's cgroup.
cleanup() {
    guest 'rm -rf /etc/systemd/system/skiff.service.d /root/skiff.yaml && systemctl daemon-reload && systemctl restart skiff'
    eventually 120 node_is_ready
    k delete ns pids --wait=false
}
trap cleanup EXIT
k create ns pids
guest 'mkdir -p /etc/systemd/system/skiff.service.d && printf "kubelet-arg:\n- pod-max-pids=40\n" >/root/skiff.yaml &&
    printf "[Service]\nEnvironment=SKIFF_CONFIG_FILE=/root/skiff.yaml\n" >/etc/systemd/system/skiff.service.d/pids.conf &&
    systemctl daemon-reload && systemctl restart skiff'
eventually 120 node_is_ready
pod forks pids -- sh -c '(for i in $(seq 60); do sleep 3600 & done); exec sleep 3600'
k wait -n pids pod/forks --for condition=Ready --timeout 120s || true
uid=$(k get pod/forks -n pids -o 'jsonpath={.metadata.uid}')
of_pod() { guest "cat /sys/fs/cgroup/skiff/node-*/*/pod$uid/$1"; }
expect 40 of_pod pids.max
# The kernel counts a rejected fork in the cgroup of the forking process, which is the container's.
refused() { guest "cat /sys/fs/cgroup/skiff/node-*/*/pod$uid/*/pids.events" | awk '/^max/ {refused += $2} END {exit refused == 0}'; }
eventually 60 refused
