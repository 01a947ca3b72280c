# After a power cut every acknowledged write is present, the pods run again, and no record of a deleted pod is left.
k create ns cut
web front 2 cut
k rollout status -n cut deployment/front --timeout 180s
pod gone cut -- sleep 3600
k wait -n cut pod/gone --for condition=Ready --timeout 120s
k delete pod -n cut gone --force --grace-period 0
acknowledged=$GUEST_DIR/acknowledged
: >"$acknowledged"
write() {
    for i in $(seq 2000); do
        k create configmap -n cut "write-$i" --from-literal=i="$i" >/dev/null && echo "write-$i" >>"$acknowledged"
    done
}
write 2>/dev/null & writer=$!
many() { [ "$(wc -l <"$acknowledged")" -ge 30 ]; }
eventually 120 many
guest_cut
kill $writer; wait $writer || true
k get configmaps -n cut -o name | sed 's,.*/,,' | sort >"$GUEST_DIR/present"
lost=$(sort "$acknowledged" | comm -23 - "$GUEST_DIR/present")
echo "$(wc -l <"$acknowledged") writes were answered before the cut"
[ -z "$lost" ] || fail "answered and lost: $lost"
k rollout status -n cut deployment/front --timeout 240s
k delete ns cut --timeout 120s
none_left() {
    local known records
    known=$(k get pods -A -o 'jsonpath={range .items[*]}{.metadata.uid}{"\n"}{end}')
    records=$(guest 'for pod in /var/lib/skiff/agent/runtime/pods/*/record; do [ ! -e "$pod" ] || grep -aoE "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" "$pod" | head -1; done' || true)
    for uid in $records; do grep -q "$uid" <<<"$known" || { echo "a record of $uid is left"; return 1; }; done
}
eventually 60 none_left
