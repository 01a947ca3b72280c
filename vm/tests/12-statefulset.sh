# A StatefulSet with a volume claim retains its data when a pod is replaced.
k create ns stateful
k apply -n stateful -f - <<EOF
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, selector: {app: db}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 2
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: db
        image: $IMAGE
        command: [sh, -c, "date >> /data/starts; sleep 3600"]
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
EOF
k rollout status -n stateful statefulset/db --timeout 180s
k exec -n stateful db-0 -- sh -c 'echo kept > /data/file'
uid=$(k get pod -n stateful db-0 -o 'jsonpath={.metadata.uid}')
k delete pod -n stateful db-0
replaced() { [ "$(k get pod -n stateful db-0 -o 'jsonpath={.metadata.uid}')" != "$uid" ]; }
eventually 60 replaced
k wait -n stateful pod/db-0 --for condition=Ready --timeout 120s
expect kept k exec -n stateful db-0 -- cat /data/file
expect 2 k exec -n stateful db-0 -- sh -c 'wc -l < /data/starts'
eventually 30 k exec -n stateful db-0 -- nslookup db-1.db.stateful.svc.cluster.local
k delete ns stateful --wait=false
