//! The cluster configuration that every node needs. The server publishes it in a ConfigMap, and nodes
//! cache it in a file.

use std::net::IpAddr;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::flags::ServerFlags;
use crate::services;

/// Cluster configuration for nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterInfo {
    /// Pod networks.
    pub cluster_cidr: Vec<String>,
    /// Networks for cluster IPs of Services.
    pub service_cidr: Vec<String>,
    /// Addresses of the cluster DNS.
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// Whether each node answers DNS queries at these addresses itself.
    pub has_node_dns: bool,
    /// CA for client certificates at the kubelet's API, PEM.
    pub client_ca: String,
    /// HTTP and HTTPS port of the Ingress controller on the server; zero if disabled.
    pub ingress_ports: [u16; 2],
}

impl ClusterInfo {
    pub fn from_flags(flags: &ServerFlags, client_ca: &str) -> anyhow::Result<ClusterInfo> {
        Ok(ClusterInfo {
            cluster_cidr: flags.cluster_cidr.clone(),
            service_cidr: flags.service_cidr.clone(),
            cluster_dns: services::dns_addresses(flags)?,
            cluster_domain: flags.cluster_domain.clone(),
            client_ca: client_ca.to_owned(),
            has_node_dns: !services::is_disabled(flags, "dns"),
            ingress_ports: match services::is_disabled(flags, "ingress") {
                true => [0, 0],
                false => [flags.ingress_http_port, flags.ingress_https_port],
            },
        })
    }

    /// The data of the ConfigMap.
    pub fn to_data(&self) -> Value {
        let dns: Vec<String> = self.cluster_dns.iter().map(ToString::to_string).collect();
        let [http, https] = self.ingress_ports;
        json!({
            "ingress-ports": format!("{http},{https}"),
            "cluster-cidr": self.cluster_cidr.join(","), "service-cidr": self.service_cidr.join(","),
            "own-dns": self.has_node_dns.to_string(), "cluster-dns": dns.join(","), "cluster-domain": self.cluster_domain, "client-ca": self.client_ca,
        })
    }

    pub fn from_data(data: &Value) -> anyhow::Result<ClusterInfo> {
        let text = |name: &str| {
            let value = data.get(name).and_then(Value::as_str);
            value.with_context(|| format!("the cluster configuration has no {name}"))
        };
        let list = |name: &str| -> anyhow::Result<Vec<String>> {
            Ok(text(name)?.split(',').filter(|item| !item.is_empty()).map(str::to_owned).collect())
        };
        let dns: Result<Vec<IpAddr>, _> = list("cluster-dns")?.iter().map(|ip| ip.parse()).collect();
        // Servers of older versions do not publish the ports.
        let ports: Vec<u16> =
            list("ingress-ports").unwrap_or_default().iter().filter_map(|port| port.parse().ok()).collect();
        Ok(ClusterInfo {
            ingress_ports: ports.try_into().unwrap_or_default(),
            has_node_dns: text("own-dns").is_ok_and(|value| value == "true"),
            cluster_cidr: list("cluster-cidr")?,
            service_cidr: list("service-cidr")?,
            cluster_dns: dns
                .context("cluster-dns in the cluster configuration is not a list of addresses")?,
            cluster_domain: text("cluster-domain")?.to_owned(),
            client_ca: text("client-ca")?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_through_config_map_data() {
        let info = ClusterInfo {
            cluster_cidr: vec!["10.42.0.0/16".into(), "fd42::/48".into()],
            service_cidr: vec!["10.43.0.0/16".into()],
            cluster_dns: vec!["10.43.0.10".parse().unwrap()],
            cluster_domain: "cluster.local".into(),
            has_node_dns: true,
            client_ca: "PEM\n".into(),
            ingress_ports: [80, 443],
        };
        assert_eq!(ClusterInfo::from_data(&info.to_data()).unwrap(), info);
        let none =
            ClusterInfo { cluster_dns: Vec::new(), has_node_dns: false, ingress_ports: [0, 0], ..info };
        assert_eq!(ClusterInfo::from_data(&none.to_data()).unwrap(), none);
        let mut old = none.to_data();
        old.as_object_mut().unwrap().retain(|name, _| !["ingress-ports", "own-dns"].contains(&name.as_str()));
        assert_eq!(ClusterInfo::from_data(&old).unwrap(), none);
        let error = ClusterInfo::from_data(&json!({"cluster-cidr": ""})).unwrap_err();
        assert_eq!(error.to_string(), "the cluster configuration has no cluster-dns");
    }
}
