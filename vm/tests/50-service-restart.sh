# Pods survive a restart of the service, and its cgroup contains no left-over processes; `skiff stop` terminates the pods and
# keeps their data.
k create ns restart
web front 2 restart
k rollout status -n restart deployment/front --timeout 180s
runs() { k get pods -n restart -o 'jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{"\n"}{end}' | sort; }
before=$(runs)
since=$(guest date +%s)
guest systemctl restart skiff
eventually 120 node_is_ready
eventually 60 expect "$before" runs
expect 0 guest "journalctl -u skiff --since @$since | grep -c 'left-over process' || true"
expect "" guest 'for pid in $(pgrep -f "[s]upervise /var/lib/skiff"); do grep skiff.service /proc/$pid/cgroup || true; done'

guest skiff stop | grep -E 'ended [0-9]+ pods'
expect inactive bash -c '"$1/guest" run systemctl is-active skiff || true' - "$vm"
expect "" guest 'pgrep -f "[s]upervise /var/lib/skiff" || true'
guest systemctl start skiff
eventually 120 node_is_ready
uids() { runs | cut -d' ' -f1; }
expect "$(cut -d' ' -f1 <<<"$before")" uids
k rollout status -n restart deployment/front --timeout 180s
k delete ns restart --wait=false
