# `skiff reset` fails while a node runs, and restores the host state from before the first start.
. "$vm/host-state.sh"
web last 1
k rollout status deployment/last --timeout 180s
if output=$(guest skiff reset --yes 2>&1); then fail "reset while the node runs: $output"; fi
grep -F 'is running on this host' <<<"$output"
if output=$(guest skiff reset --yes --data-dir /var/lib/other 2>&1); then fail "reset of another directory: $output"; fi
grep -F 'skiff server (pid' <<<"$output"
expect True k get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
# A pod that ignores SIGTERM does not block the reset.
guest skiff reset --stop --yes
host_state >"$GUEST_DIR/host-after"
diff "$GUEST_DIR/host-before" "$GUEST_DIR/host-after" || fail "the host is not as it was"
expect "" guest 'ls /var/lib/skiff 2>/dev/null || true'
# A second reset, with nothing left to remove, succeeds.
guest skiff reset --yes
