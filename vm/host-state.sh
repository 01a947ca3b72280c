# host_state: prints the host state that skiff may change, one item per line, to compare it before the first start and
# after `skiff reset`.
host_state() {
    guest '
        ip -o link | awk -F": " "{print \"link\", \$2}"
        ip -o addr show scope global | awk "{print \"address\", \$2, \$4}"
        ip route; ip -6 route | grep -v "^fe80" | sed "s/ expires [0-9]*sec//"
        nft list ruleset | sed "s/^/rule /"
        sysctl -a 2>/dev/null | grep -E "^net\.(ipv4|ipv6)\.(ip_forward|conf\.(all|default|lo)\.(forwarding|route_localnet|rp_filter))"
        sysctl -a 2>/dev/null | grep -E "^(kernel\.(panic|panic_on_oops)|vm\.(overcommit_memory|panic_on_oom))"
        awk "{print \"mount\", \$2}" /proc/mounts | grep -vE "/run/(user|credentials)|binfmt_misc" | sort
        find /sys/fs/cgroup -maxdepth 2 -type d | grep -iE "kube|skiff" || true
        ls -d /var/lib/kubelet /var/log/pods /var/log/containers /run/skiff 2>/dev/null || true
        cat /sys/kernel/security/apparmor/profiles 2>/dev/null | sort || true
        pgrep -a skiff || true
    '
}
