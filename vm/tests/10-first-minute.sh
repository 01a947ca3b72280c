# Commands from the README on a machine without any preparation.
expect 700 guest stat -c %a /root/.kube
expect 600 guest stat -c %a /root/.kube/config
expect 0 guest systemctl show --property NRestarts --value skiff
expect skiff k config current-context
expect ok k get --raw /readyz
k get --raw '/readyz?verbose' | grep -F '[+]store-writable ok'
# Other commands use the kubeconfig in the data directory of the server.
guest skiff token create --ttl 1m | grep -q ::
# backup accepts a bare file name; it fails only because the store is in use.
guest 'cd /tmp && ! skiff backup b.file 2>err && grep "in use" err && rm -f err'
