//! Resolves the names of a cluster according to the Kubernetes DNS specification, as CoreDNS's
//! kubernetes plugin does. Does no I/O: objects come from [`View`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use reconcile::Object as _;

use crate::wire::{Rcode, record_type};

/// The TTL of all records in seconds.
pub const RECORD_TTL_SECONDS: u32 = 5;
/// The version of the DNS specification, in `dns-version.<domain>`.
const DNS_SCHEMA_VERSION: &str = "1.1.0";
/// The maximum length of a CNAME chain.
const MAX_ALIAS_DEPTH: usize = 8;

/// Read access to the cluster.
pub trait View {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    /// The EndpointSlices of a Service.
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>>;
    fn has_namespace(&self, name: &str) -> bool;
    /// The Services with this cluster IP.
    fn services_by_ip(&self, address: IpAddr) -> Vec<Arc<Service>>;
    /// The EndpointSlices with an endpoint at this address.
    fn slices_by_address(&self, address: IpAddr) -> Vec<Arc<EndpointSlice>>;
    /// Changes when any of the objects changes.
    fn serial(&self) -> u32;
}

/// A resource record. Names have no trailing dot.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub name: String,
    pub ttl: u32,
    pub data: RecordData,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RecordData {
    A(Ipv4Addr),
    Aaaa(Ipv6Addr),
    Cname(String),
    Ptr(String),
    Ns(String),
    Srv { weight: u16, port: u16, target: String },
    Txt(String),
    Soa { server: String, person: String, serial: u32, minimum: u32 },
}

impl RecordData {
    pub fn record_type(&self) -> u16 {
        match self {
            RecordData::A(_) => record_type::A,
            RecordData::Aaaa(_) => record_type::AAAA,
            RecordData::Cname(_) => record_type::CNAME,
            RecordData::Ptr(_) => record_type::PTR,
            RecordData::Ns(_) => record_type::NS,
            RecordData::Srv { .. } => record_type::SRV,
            RecordData::Txt(_) => record_type::TXT,
            RecordData::Soa { .. } => record_type::SOA,
        }
    }

    fn from_address(address: IpAddr) -> RecordData {
        match address {
            IpAddr::V4(v4) => RecordData::A(v4),
            IpAddr::V6(v6) => RecordData::Aaaa(v6),
        }
    }
}

/// The answer to a query.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub code: Rcode,
    pub authoritative: bool,
    pub answers: Vec<Record>,
    pub authority: Vec<Record>,
    pub additional: Vec<Record>,
    /// A name outside the cluster that the last CNAME refers to. It must be resolved upstream.
    pub external_name: Option<String>,
}

impl Answer {
    pub fn empty(code: Rcode) -> Answer {
        Answer {
            code,
            authoritative: true,
            answers: Vec::new(),
            authority: Vec::new(),
            additional: Vec::new(),
            external_name: None,
        }
    }
}

/// The result of a lookup in the cluster domain.
enum LookupResult {
    /// The name does not exist, and neither does a name below it (NXDOMAIN).
    NotFound,
    /// The name exists without records (NODATA).
    NoData,
    /// Service addresses, each with the name of its endpoint.
    Addresses(Vec<ServiceAddress>),
    /// An ExternalName Service.
    Alias(String),
    Text(String),
    ZoneRoot,
}

/// An address and port behind a Service name.
#[derive(Clone, Debug, PartialEq)]
struct ServiceAddress {
    name: String,
    address: IpAddr,
    /// `None` if no port is declared.
    port: Option<u16>,
}

/// The cluster domain.
pub struct Zone<'a> {
    /// In lower case, such as `cluster.local`.
    pub domain: &'a str,
    pub view: &'a dyn View,
}

impl Zone<'_> {
    /// Answers a query. `None` if the name is not in the cluster domain.
    pub fn answer(&self, name: &str, record_type: u16) -> Option<Answer> {
        if let Some(address) = parse_reverse_name(name) {
            return self.reverse_lookup(name, address, record_type);
        }
        let relative_name = self.strip_domain(name)?;
        Some(self.forward_lookup(name, relative_name, record_type))
    }

    /// The part of a name before the cluster domain.
    fn strip_domain<'n>(&self, name: &'n str) -> Option<&'n str> {
        let rest = name.strip_suffix(self.domain)?;
        if rest.is_empty() { Some("") } else { rest.strip_suffix('.') }
    }

    fn forward_lookup(&self, name: &str, relative_name: &str, record_type: u16) -> Answer {
        let mut answer = Answer::empty(Rcode::Ok);
        let (mut owner_name, mut found) = (name.to_owned(), self.lookup(relative_name));
        for _ in 0..MAX_ALIAS_DEPTH {
            let LookupResult::Alias(target) = found else { break };
            let record =
                Record { name: owner_name, ttl: RECORD_TTL_SECONDS, data: RecordData::Cname(target.clone()) };
            // A CNAME loop.
            if answer.answers.contains(&record) {
                return answer;
            }
            answer.answers.push(record);
            if record_type == record_type::CNAME {
                return answer;
            }
            let Some(relative_name) = self.strip_domain(&target) else {
                answer.external_name = Some(target);
                return answer;
            };
            found = self.lookup(relative_name);
            owner_name = target;
        }
        match found {
            LookupResult::NotFound => answer.code = Rcode::NoSuchName,
            LookupResult::NoData | LookupResult::Alias(_) => {}
            LookupResult::Text(text) if record_type == record_type::TXT => {
                answer.answers.push(Record {
                    name: owner_name,
                    ttl: RECORD_TTL_SECONDS,
                    data: RecordData::Txt(text),
                });
            }
            LookupResult::Text(_) => {}
            LookupResult::ZoneRoot if record_type == record_type::SOA => {
                answer.answers.push(self.soa_record())
            }
            LookupResult::ZoneRoot if record_type == record_type::NS => {
                let server = format!("kube-dns.kube-system.svc.{}", self.domain);
                answer.answers.push(Record {
                    name: owner_name,
                    ttl: RECORD_TTL_SECONDS,
                    data: RecordData::Ns(server),
                });
            }
            LookupResult::ZoneRoot => {}
            LookupResult::Addresses(targets) => {
                self.add_address_records(&mut answer, &owner_name, record_type, targets)
            }
        }
        if answer.answers.is_empty() || answer.code != Rcode::Ok {
            answer.authority.push(self.soa_record());
        }
        answer
    }

    fn add_address_records(
        &self,
        answer: &mut Answer,
        name: &str,
        record_type: u16,
        targets: Vec<ServiceAddress>,
    ) {
        let push = |records: &mut Vec<Record>, name: &str, data: RecordData| {
            let record = Record { name: name.to_owned(), ttl: RECORD_TTL_SECONDS, data };
            if !records.contains(&record) {
                records.push(record);
            }
        };
        match record_type {
            record_type::A | record_type::AAAA => {
                for target in targets {
                    let data = RecordData::from_address(target.address);
                    if data.record_type() == record_type {
                        push(&mut answer.answers, name, data);
                    }
                }
            }
            record_type::SRV => {
                let weight = u16::try_from(100 / targets.len().max(1)).unwrap_or(100).max(1);
                for target in &targets {
                    let Some(port) = target.port else { continue };
                    let data = RecordData::Srv { weight, port, target: target.name.clone() };
                    push(&mut answer.answers, name, data);
                    push(&mut answer.additional, &target.name, RecordData::from_address(target.address));
                }
            }
            _ => {}
        }
    }

    /// The SOA record, which negative answers need for caching.
    fn soa_record(&self) -> Record {
        let data = RecordData::Soa {
            server: format!("ns.dns.{}", self.domain),
            person: format!("hostmaster.{}", self.domain),
            serial: self.view.serial(),
            minimum: RECORD_TTL_SECONDS,
        };
        Record { name: self.domain.to_owned(), ttl: RECORD_TTL_SECONDS, data }
    }

    fn lookup(&self, relative_name: &str) -> LookupResult {
        let mut labels: Vec<&str> = relative_name.split('.').filter(|label| !label.is_empty()).collect();
        let Some(last) = labels.pop() else { return LookupResult::ZoneRoot };
        match last {
            "dns-version" if labels.is_empty() => LookupResult::Text(DNS_SCHEMA_VERSION.to_owned()),
            "svc" => self.find_service(labels),
            "pod" => self.find_pod(&labels),
            _ => LookupResult::NotFound,
        }
    }

    /// `10-42-0-5.default.pod` resolves to 10.42.0.5, whether such a pod exists or not (`pods
    /// insecure` of CoreDNS).
    fn find_pod(&self, labels: &[&str]) -> LookupResult {
        let (pod, namespace) = match labels {
            [] => return LookupResult::NoData,
            [namespace] => {
                return if self.view.has_namespace(namespace) {
                    LookupResult::NoData
                } else {
                    LookupResult::NotFound
                };
            }
            [pod, namespace] => (pod, namespace),
            _ => return LookupResult::NotFound,
        };
        let address = pod.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
        let address = address.or_else(|_| pod.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6));
        match address {
            Ok(address) if self.view.has_namespace(namespace) => {
                let name = format!("{pod}.{namespace}.pod.{}", self.domain);
                LookupResult::Addresses(vec![ServiceAddress { name, address, port: None }])
            }
            _ => LookupResult::NotFound,
        }
    }

    fn find_service(&self, mut labels: Vec<&str>) -> LookupResult {
        let Some(namespace) = labels.pop() else { return LookupResult::NoData };
        let Some(name) = labels.pop() else {
            return if self.view.has_namespace(namespace) {
                LookupResult::NoData
            } else {
                LookupResult::NotFound
            };
        };
        let filter = match labels.as_slice() {
            [] => EndpointFilter::default(),
            [endpoint] => EndpointFilter { endpoint: Some(endpoint), ..EndpointFilter::default() },
            [port, proto] => match (port.strip_prefix('_'), proto.strip_prefix('_')) {
                (Some(port), Some(proto)) => {
                    EndpointFilter { port: Some((port, proto)), ..EndpointFilter::default() }
                }
                _ => return LookupResult::NotFound,
            },
            _ => return LookupResult::NotFound,
        };
        let Some(service) = self.view.service(namespace, name) else { return LookupResult::NotFound };
        let Some(spec) = service.spec.as_ref() else { return LookupResult::NotFound };
        if spec.type_.as_deref() == Some("ExternalName") {
            let target = spec.external_name.as_deref().unwrap_or_default();
            return LookupResult::Alias(target.trim_end_matches('.').to_lowercase());
        }
        let fqdn = format!("{name}.{namespace}.svc.{}", self.domain);
        let ips: Vec<IpAddr> = cluster_ips(spec).collect();
        let targets = if ips.is_empty() || filter.endpoint.is_some() {
            self.endpoints(&service, &fqdn, &filter)
        } else {
            cluster_ip_targets(spec, &fqdn, &ips, &filter)
        };
        if targets.is_empty() { LookupResult::NotFound } else { LookupResult::Addresses(targets) }
    }

    fn endpoints(&self, service: &Service, fqdn: &str, filter: &EndpointFilter<'_>) -> Vec<ServiceAddress> {
        let mut targets = Vec::new();
        for slice in self.view.slices(service.namespace(), service.name()) {
            let declared = slice.ports.iter().flatten();
            let matching =
                declared.filter(|port| filter.matches_port(port.name.as_deref(), port.protocol.as_deref()));
            let mut ports: Vec<Option<u16>> =
                matching.map(|port| port.port.and_then(|port| u16::try_from(port).ok())).collect();
            if slice.ports.as_ref().is_none_or(Vec::is_empty) && filter.port.is_none() {
                ports.push(None);
            }
            for (endpoint, address) in ready_endpoints(&slice) {
                let hostname = endpoint_name(endpoint, address);
                if filter.endpoint.is_some_and(|requested| requested != hostname) {
                    continue;
                }
                let name = format!("{hostname}.{fqdn}");
                targets.extend(ports.iter().map(|port| ServiceAddress {
                    name: name.clone(),
                    address,
                    port: *port,
                }));
            }
        }
        targets
    }

    fn reverse_lookup(&self, name: &str, address: IpAddr, record_type: u16) -> Option<Answer> {
        let mut names: Vec<String> = self
            .view
            .services_by_ip(address)
            .iter()
            .map(|service| format!("{}.{}.svc.{}", service.name(), service.namespace(), self.domain))
            .collect();
        if names.is_empty() {
            for slice in self.view.slices_by_address(address) {
                let Some(service) = slice.label("kubernetes.io/service-name") else { continue };
                let matching = ready_endpoints(&slice).filter(|(_, found)| *found == address);
                names.extend(matching.map(|(endpoint, _)| {
                    let hostname = endpoint_name(endpoint, address);
                    format!("{hostname}.{service}.{}.svc.{}", slice.namespace(), self.domain)
                }));
            }
        }
        // Addresses outside the cluster are resolved upstream.
        if names.is_empty() {
            return None;
        }
        let mut answer = Answer::empty(Rcode::Ok);
        if record_type == record_type::PTR {
            names.sort();
            names.dedup();
            let record = |target| Record {
                name: name.to_owned(),
                ttl: RECORD_TTL_SECONDS,
                data: RecordData::Ptr(target),
            };
            answer.answers = names.into_iter().map(record).collect();
        } else {
            answer.authority.push(self.soa_record());
        }
        Some(answer)
    }
}

/// The part of a Service that a name selects.
#[derive(Debug, Default)]
struct EndpointFilter<'a> {
    endpoint: Option<&'a str>,
    /// The port name and the protocol.
    port: Option<(&'a str, &'a str)>,
}

impl EndpointFilter<'_> {
    fn matches_port(&self, name: Option<&str>, protocol: Option<&str>) -> bool {
        self.port.is_none_or(|(port, proto)| {
            name.is_some_and(|name| name.eq_ignore_ascii_case(port))
                && protocol.unwrap_or("TCP").eq_ignore_ascii_case(proto)
        })
    }
}

/// The cluster IPs of a Service. None for a headless one.
pub(crate) fn cluster_ips(spec: &ServiceSpec) -> impl Iterator<Item = IpAddr> {
    let all_ips = spec.cluster_ips.iter().flatten();
    let single_ip = spec.cluster_ip.iter().filter(|_| spec.cluster_ips.as_ref().is_none_or(Vec::is_empty));
    all_ips.chain(single_ip).filter_map(|text| text.parse().ok())
}

/// The cluster IPs of a Service with each selected port.
fn cluster_ip_targets(
    spec: &ServiceSpec,
    fqdn: &str,
    ips: &[IpAddr],
    filter: &EndpointFilter<'_>,
) -> Vec<ServiceAddress> {
    let ports = spec.ports.iter().flatten();
    let ports = ports.filter(|port| filter.matches_port(port.name.as_deref(), port.protocol.as_deref()));
    let target = |port: Option<u16>, address: &IpAddr| ServiceAddress {
        name: fqdn.to_owned(),
        address: *address,
        port,
    };
    ports.flat_map(|port| ips.iter().map(move |ip| target(u16::try_from(port.port).ok(), ip))).collect()
}

/// The endpoints that are ready.
fn ready_endpoints(slice: &EndpointSlice) -> impl Iterator<Item = (&Endpoint, IpAddr)> {
    let ready = |endpoint: &&Endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    };
    let address = |endpoint: &Endpoint| endpoint.addresses.first().and_then(|text| text.parse().ok());
    slice.endpoints.iter().flatten().filter(ready).filter_map(move |one| Some((one, address(one)?)))
}

/// The name of an endpoint within its Service.
fn endpoint_name(endpoint: &Endpoint, address: IpAddr) -> String {
    match endpoint.hostname.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => name.to_lowercase(),
        None => address.to_string().replace(['.', ':'], "-"),
    }
}

/// Parses a name in `in-addr.arpa` or `ip6.arpa`.
fn parse_reverse_name(name: &str) -> Option<IpAddr> {
    if let Some(rest) = name.strip_suffix(".in-addr.arpa") {
        let parts: Vec<&str> = rest.rsplit('.').collect();
        return parts.join(".").parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    }
    let rest = name.strip_suffix(".ip6.arpa")?;
    let digits: Vec<u8> = rest
        .rsplit('.')
        .map(|digit| if digit.len() == 1 { u8::from_str_radix(digit, 16).ok() } else { None })
        .collect::<Option<_>>()?;
    let digits: [u8; 32] = digits.try_into().ok()?;
    let number = digits.iter().fold(0u128, |number, digit| number << 4 | u128::from(*digit));
    Some(IpAddr::V6(Ipv6Addr::from_bits(number)))
}

#[cfg(test)]
mod tests;
