# Privileged containers, user namespaces, read-only root file systems, seccomp and AppArmor profiles.
k create ns security
guest 'printf "abi <abi/3.0>,\nprofile skiff-test-deny-write flags=(attach_disconnected) {\n  file,\n  network,\n  capability,\n  deny /tmp/** w,\n}\n" | apparmor_parser -r'
manifest() { # NAME POD-FIELDS CONTAINER-FIELDS
    cat <<EOF
---
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  terminationGracePeriodSeconds: 1
  $2
  containers:
  - name: main
    image: $IMAGE
    command: [sleep, "3600"]
    $3
EOF
}
{
    manifest privileged "" "securityContext: {privileged: true}"
    manifest userns "hostUsers: false" ""
    manifest readonly "" "securityContext: {readOnlyRootFilesystem: true}"
    manifest seccomp "securityContext: {seccompProfile: {type: RuntimeDefault}}" ""
    manifest unconfined "securityContext: {seccompProfile: {type: Unconfined}}" ""
    manifest apparmor "securityContext: {appArmorProfile: {type: Localhost, localhostProfile: skiff-test-deny-write}}" ""
} | k apply -n security -f -
for name in privileged userns readonly seccomp unconfined apparmor; do
    k wait -n security "pod/$name" --for condition=Ready --timeout 180s
done
inside() { local name=$1; shift; k exec -n security "$name" -- "$@"; }
denied() { ! inside "$@"; }

inside privileged sh -c 'mkdir -p /mnt/x && mount -t tmpfs none /mnt/x && umount /mnt/x'
inside privileged test -e /dev/vda
denied userns sh -c 'mkdir -p /mnt/x && mount -t tmpfs none /mnt/x'
expect 0 inside userns id -u
[ "$(inside userns awk '{print $2; exit}' /proc/self/uid_map)" -gt 0 ] || fail "root of a user namespace is root of the node"
denied readonly touch /file
inside unconfined test "$(inside unconfined awk '/^Seccomp:/ {print $2}' /proc/self/status)" = 0
expect 2 inside seccomp awk '/^Seccomp:/ {print $2}' /proc/self/status
denied apparmor touch /tmp/file
inside apparmor touch /root/file
inside apparmor cat /proc/self/attr/current | grep -q skiff-test-deny-write
# Without appArmorProfile the container has the runtime's default profile.
inside readonly cat /proc/self/attr/current
k delete ns security --wait=false
guest apparmor_parser -R /dev/stdin <<<'profile skiff-test-deny-write {}' || true
