# In-place resize, up and down, as shown by the cgroup.
k create ns resize
k apply -n resize -f - <<EOF
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: $IMAGE
    command: [sleep, "3600"]
    resources: {requests: {cpu: 100m, memory: 32Mi}, limits: {cpu: 200m, memory: 64Mi}}
EOF
k wait -n resize pod/web --for condition=Ready --timeout 120s
limits() { k exec -n resize web -- cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max | tr '\n' ' '; }
limits_are() { echo "limits are $(limits), wanted $1"; [ "$(limits)" = "$1" ]; }
k patch -n resize pod web --subresource resize -p '{"spec":{"containers":[{"name":"main","resources":{"limits":{"cpu":"400m","memory":"96Mi"}}}]}}'
eventually 60 limits_are "40000 100000 100663296 "
k patch -n resize pod web --subresource resize -p '{"spec":{"containers":[{"name":"main","resources":{"limits":{"cpu":"150m","memory":"80Mi"}}}]}}'
eventually 60 limits_are "15000 100000 83886080 "
eventually 30 field "pod/web -n resize" '{.status.containerStatuses[0].resources.limits.cpu}' 150m
expect 0 k get pod web -n resize -o 'jsonpath={.status.containerStatuses[0].restartCount}'
expect "" k get pod web -n resize -o 'jsonpath={.status.conditions[?(@.type=="PodResizeInProgress")].status}'
k delete ns resize --wait=false
