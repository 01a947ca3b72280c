# After a power cut the pods run again, and nothing is left of those that were deleted.
k create ns cut
web front 2 cut
k rollout status -n cut deployment/front --timeout 180s
pod gone cut -- sleep 3600
k wait -n cut pod/gone --for condition=Ready --timeout 120s
k delete pod -n cut gone --force --grace-period 0
guest sync
guest_cut
k rollout status -n cut deployment/front --timeout 240s
k delete ns cut --timeout 120s
none_left() {
    local known records
    known=$(k get pods -A -o 'jsonpath={range .items[*]}{.metadata.uid}{"\n"}{end}')
    records=$(guest 'grep -lar -e " " /dev/null; for pod in /var/lib/skiff/agent/runtime/pods/*/record; do [ ! -e "$pod" ] || grep -aoE "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" "$pod" | head -1; done' || true)
    for uid in $records; do grep -q "$uid" <<<"$known" || { echo "a record of $uid is left"; return 1; }; done
}
eventually 60 none_left
