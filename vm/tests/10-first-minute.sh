# The README's commands on a machine where nothing was prepared.
expect 700 guest stat -c %a /root/.kube
expect 600 guest stat -c %a /root/.kube/config
expect 0 guest systemctl show --property NRestarts --value skiff
expect skiff k config current-context
expect ok k get --raw /readyz
k get --raw '/readyz?verbose' | grep -F '[+]store-writable ok'
# Commands beside the server use the data directory's own kubeconfig.
guest skiff token create --ttl 1m | grep -q ::
# A bare file name is a path, too; the store is in use, which is the only objection.
guest 'cd /tmp && ! skiff backup b.file 2>err && grep "in use" err && rm -f err'
