# CPU and memory limits are enforced with cgroup v2.
k create ns limits
k apply -n limits -f - <<EOF
apiVersion: v1
kind: Pod
metadata: {name: limited}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: $IMAGE
    command: [sleep, "3600"]
    resources: {requests: {cpu: 100m}, limits: {cpu: 250m, memory: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: hungry}
spec:
  restartPolicy: Never
  containers:
  - name: main
    image: $IMAGE
    command: [sh, -c, "tail /dev/zero"]
    resources: {limits: {memory: 24Mi}}
EOF
k wait -n limits pod/limited --for condition=Ready --timeout 120s
expect "25000 100000" k exec -n limits limited -- cat /sys/fs/cgroup/cpu.max
expect 67108864 k exec -n limits limited -- cat /sys/fs/cgroup/memory.max
eventually 120 field "pod/hungry -n limits" '{.status.containerStatuses[0].state.terminated.reason}' OOMKilled
expect 137 k get pod/hungry -n limits -o 'jsonpath={.status.containerStatuses[0].state.terminated.exitCode}'
k delete ns limits --wait=false
