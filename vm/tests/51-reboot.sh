# A clean reboot terminates pods within their grace periods, does not wait longer, and starts them again after the boot.
k create ns reboot
k apply -n reboot -f - <<EOF
apiVersion: v1
kind: Pod
metadata: {name: polite}
spec:
  volumes: [{name: file, hostPath: {path: /root/reboot-test, type: DirectoryOrCreate}}]
  containers:
  - name: main
    image: $IMAGE
    command: [sh, -c, "trap 'echo ended >> /file/log; exit 0' TERM; while true; do sleep 0.2; done"]
    volumeMounts: [{name: file, mountPath: /file}]
---
apiVersion: v1
kind: Pod
metadata: {name: deaf}
spec:
  containers:
  - {name: main, image: $IMAGE, command: [sleep, "36000"]}
EOF
web front 2 reboot
k wait -n reboot pod --all --for condition=Ready --timeout 180s
uids() { k get pods -n reboot -o 'jsonpath={range .items[*]}{.metadata.uid}{"\n"}{end}' | sort; }
before=$(uids)
said=$("$vm/guest" reboot)
echo "$said"
took=$(sed -n 's/shutdown took \([0-9]*\) s/\1/p' <<<"$said")
[ "$took" -lt 60 ] || fail "the shutdown took $took s: something held it up"
guest_is_back
expect ended guest cat /root/reboot-test/log
k wait -n reboot pod --all --for condition=Ready --timeout 240s
expect "$before" uids
expect 1 k get pod -n reboot deaf -o 'jsonpath={.status.containerStatuses[0].restartCount}'
# Of earlier runs of a pod only the last record is kept, so there are at most two records per pod.
records() { guest 'ls /var/lib/skiff/agent/runtime/pods | wc -l'; }
all=$(k get pods -A --no-headers | wc -l)
few() { echo "$(records) records for $all pods"; [ "$(records)" -le $((2 * all)) ]; }
eventually 60 few
k delete ns reboot --timeout 120s
all=$(k get pods -A --no-headers 2>/dev/null | wc -l)
eventually 60 few
guest rm -r /root/reboot-test
