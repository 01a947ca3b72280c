//! What the names of a cluster mean, as CoreDNS' kubernetes plugin has it. Pure: what there is comes by [`View`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use reconcile::Object as _;

use crate::wire::{Code, kind};

/// How long clients may keep what we say, in seconds.
pub const TTL: u32 = 5;
/// The version of the rules of names that this follows.
const SCHEMA: &str = "1.1.0";
/// How often one name may lead to another.
const MOST_HOPS: usize = 8;

/// What there is in a cluster.
pub trait View {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    /// The slices that belong to a Service.
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>>;
    fn has_namespace(&self, name: &str) -> bool;
    /// The Services with this cluster IP.
    fn services_at(&self, address: IpAddr) -> Vec<Arc<Service>>;
    /// The slices with an endpoint at this address.
    fn slices_at(&self, address: IpAddr) -> Vec<Arc<EndpointSlice>>;
    /// Changes whenever something else does.
    fn serial(&self) -> u32;
}

/// One record. Names have no dot at their end.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub name: String,
    pub ttl: u32,
    pub data: Data,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    A(Ipv4Addr),
    Aaaa(Ipv6Addr),
    Cname(String),
    Ptr(String),
    Ns(String),
    Srv { weight: u16, port: u16, target: String },
    Txt(String),
    Soa { server: String, person: String, serial: u32, minimum: u32 },
}

impl Data {
    pub fn kind(&self) -> u16 {
        match self {
            Data::A(_) => kind::A,
            Data::Aaaa(_) => kind::AAAA,
            Data::Cname(_) => kind::CNAME,
            Data::Ptr(_) => kind::PTR,
            Data::Ns(_) => kind::NS,
            Data::Srv { .. } => kind::SRV,
            Data::Txt(_) => kind::TXT,
            Data::Soa { .. } => kind::SOA,
        }
    }

    fn address(address: IpAddr) -> Data {
        match address {
            IpAddr::V4(v4) => Data::A(v4),
            IpAddr::V6(v6) => Data::Aaaa(v6),
        }
    }
}

/// What a question is answered with.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub code: Code,
    pub authoritative: bool,
    pub answers: Vec<Record>,
    pub authority: Vec<Record>,
    pub additional: Vec<Record>,
    /// A name outside the cluster that the last record leads to: others have to say what is there.
    pub elsewhere: Option<String>,
}

impl Answer {
    pub fn empty(code: Code) -> Answer {
        Answer {
            code,
            authoritative: true,
            answers: Vec::new(),
            authority: Vec::new(),
            additional: Vec::new(),
            elsewhere: None,
        }
    }
}

/// What is at a name of the cluster.
enum Found {
    /// Nothing, and no name below it either as far as one can tell.
    Nothing,
    /// A name without records of its own.
    Bare,
    /// Places to go to, each with the name it has itself.
    Places(Vec<Place>),
    /// Another name.
    Alias(String),
    Text(String),
    Apex,
}

/// An address and a port behind a name.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    name: String,
    address: IpAddr,
    /// None where no port is declared.
    port: Option<u16>,
}

/// The names of one cluster.
pub struct Zone<'a> {
    /// In lower case, such as `cluster.local`.
    pub domain: &'a str,
    pub view: &'a dyn View,
}

impl Zone<'_> {
    /// The answer, or `None` where the name is for others to know.
    pub fn answer(&self, name: &str, wanted: u16) -> Option<Answer> {
        if let Some(address) = reversed(name) {
            return self.reverse(name, address, wanted);
        }
        let inside = self.inside(name)?;
        Some(self.forward(name, inside, wanted))
    }

    /// The part of a name before the domain.
    fn inside<'n>(&self, name: &'n str) -> Option<&'n str> {
        let rest = name.strip_suffix(self.domain)?;
        if rest.is_empty() { Some("") } else { rest.strip_suffix('.') }
    }

    fn forward(&self, name: &str, inside: &str, wanted: u16) -> Answer {
        let mut answer = Answer::empty(Code::Ok);
        let (mut at, mut found) = (name.to_owned(), self.find(inside));
        for _ in 0..MOST_HOPS {
            let Found::Alias(target) = found else { break };
            let record = Record { name: at, ttl: TTL, data: Data::Cname(target.clone()) };
            // One that leads to itself leads nowhere.
            if answer.answers.contains(&record) {
                return answer;
            }
            answer.answers.push(record);
            if wanted == kind::CNAME {
                return answer;
            }
            let Some(inside) = self.inside(&target) else {
                answer.elsewhere = Some(target);
                return answer;
            };
            found = self.find(inside);
            at = target;
        }
        match found {
            Found::Nothing => answer.code = Code::NoSuchName,
            Found::Bare | Found::Alias(_) => {}
            Found::Text(text) if wanted == kind::TXT => {
                answer.answers.push(Record { name: at, ttl: TTL, data: Data::Txt(text) });
            }
            Found::Text(_) => {}
            Found::Apex if wanted == kind::SOA => answer.answers.push(self.start()),
            Found::Apex if wanted == kind::NS => {
                let server = format!("kube-dns.kube-system.svc.{}", self.domain);
                answer.answers.push(Record { name: at, ttl: TTL, data: Data::Ns(server) });
            }
            Found::Apex => {}
            Found::Places(places) => self.places(&mut answer, &at, wanted, places),
        }
        if answer.answers.is_empty() || answer.code != Code::Ok {
            answer.authority.push(self.start());
        }
        answer
    }

    fn places(&self, answer: &mut Answer, name: &str, wanted: u16, places: Vec<Place>) {
        let push = |records: &mut Vec<Record>, name: &str, data: Data| {
            let record = Record { name: name.to_owned(), ttl: TTL, data };
            if !records.contains(&record) {
                records.push(record);
            }
        };
        match wanted {
            kind::A | kind::AAAA => {
                for place in places {
                    let data = Data::address(place.address);
                    if data.kind() == wanted {
                        push(&mut answer.answers, name, data);
                    }
                }
            }
            kind::SRV => {
                let weight = u16::try_from(100 / places.len().max(1)).unwrap_or(100).max(1);
                for place in &places {
                    let Some(port) = place.port else { continue };
                    let data = Data::Srv { weight, port, target: place.name.clone() };
                    push(&mut answer.answers, name, data);
                    push(&mut answer.additional, &place.name, Data::address(place.address));
                }
            }
            _ => {}
        }
    }

    /// The record with which answers that say nothing are dated.
    fn start(&self) -> Record {
        let data = Data::Soa {
            server: format!("ns.dns.{}", self.domain),
            person: format!("hostmaster.{}", self.domain),
            serial: self.view.serial(),
            minimum: TTL,
        };
        Record { name: self.domain.to_owned(), ttl: TTL, data }
    }

    fn find(&self, inside: &str) -> Found {
        let mut labels: Vec<&str> = inside.split('.').filter(|label| !label.is_empty()).collect();
        let Some(last) = labels.pop() else { return Found::Apex };
        match last {
            "dns-version" if labels.is_empty() => Found::Text(SCHEMA.to_owned()),
            "svc" => self.find_service(labels),
            "pod" => self.find_pod(&labels),
            _ => Found::Nothing,
        }
    }

    /// `10-42-0-5.default.pod` is 10.42.0.5, whether there is such a pod or not.
    fn find_pod(&self, labels: &[&str]) -> Found {
        let (pod, namespace) = match labels {
            [] => return Found::Bare,
            [namespace] => {
                return if self.view.has_namespace(namespace) { Found::Bare } else { Found::Nothing };
            }
            [pod, namespace] => (pod, namespace),
            _ => return Found::Nothing,
        };
        let address = pod.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
        let address = address.or_else(|_| pod.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6));
        match address {
            Ok(address) if self.view.has_namespace(namespace) => {
                let name = format!("{pod}.{namespace}.pod.{}", self.domain);
                Found::Places(vec![Place { name, address, port: None }])
            }
            _ => Found::Nothing,
        }
    }

    fn find_service(&self, mut labels: Vec<&str>) -> Found {
        let Some(namespace) = labels.pop() else { return Found::Bare };
        let Some(name) = labels.pop() else {
            return if self.view.has_namespace(namespace) { Found::Bare } else { Found::Nothing };
        };
        let asked = match labels.as_slice() {
            [] => Asked::default(),
            [endpoint] => Asked { endpoint: Some(endpoint), ..Asked::default() },
            [port, proto] => match (port.strip_prefix('_'), proto.strip_prefix('_')) {
                (Some(port), Some(proto)) => Asked { port: Some((port, proto)), ..Asked::default() },
                _ => return Found::Nothing,
            },
            _ => return Found::Nothing,
        };
        let Some(service) = self.view.service(namespace, name) else { return Found::Nothing };
        let Some(spec) = service.spec.as_ref() else { return Found::Nothing };
        if spec.type_.as_deref() == Some("ExternalName") {
            let target = spec.external_name.as_deref().unwrap_or_default();
            return Found::Alias(target.trim_end_matches('.').to_lowercase());
        }
        let full = format!("{name}.{namespace}.svc.{}", self.domain);
        let ips: Vec<IpAddr> = cluster_ips(spec).collect();
        let places = if ips.is_empty() || asked.endpoint.is_some() {
            self.endpoints(&service, &full, &asked)
        } else {
            fronts(spec, &full, &ips, &asked)
        };
        if places.is_empty() { Found::Nothing } else { Found::Places(places) }
    }

    fn endpoints(&self, service: &Service, full: &str, asked: &Asked<'_>) -> Vec<Place> {
        let mut places = Vec::new();
        for slice in self.view.slices(service.namespace(), service.name()) {
            let declared = slice.ports.iter().flatten();
            let wanted =
                declared.filter(|port| asked.is_port(port.name.as_deref(), port.protocol.as_deref()));
            let mut ports: Vec<Option<u16>> =
                wanted.map(|port| port.port.and_then(|port| u16::try_from(port).ok())).collect();
            if slice.ports.as_ref().is_none_or(Vec::is_empty) && asked.port.is_none() {
                ports.push(None);
            }
            for (endpoint, address) in ready(&slice) {
                let own = own_name(endpoint, address);
                if asked.endpoint.is_some_and(|asked| asked != own) {
                    continue;
                }
                let name = format!("{own}.{full}");
                places.extend(ports.iter().map(|port| Place { name: name.clone(), address, port: *port }));
            }
        }
        places
    }

    fn reverse(&self, name: &str, address: IpAddr, wanted: u16) -> Option<Answer> {
        let mut names: Vec<String> = self
            .view
            .services_at(address)
            .iter()
            .map(|service| format!("{}.{}.svc.{}", service.name(), service.namespace(), self.domain))
            .collect();
        if names.is_empty() {
            for slice in self.view.slices_at(address) {
                let Some(service) = slice.label("kubernetes.io/service-name") else { continue };
                let here = ready(&slice).filter(|(_, found)| *found == address);
                names.extend(here.map(|(endpoint, _)| {
                    let own = own_name(endpoint, address);
                    format!("{own}.{service}.{}.svc.{}", slice.namespace(), self.domain)
                }));
            }
        }
        // Addresses that are not ours have names elsewhere.
        if names.is_empty() {
            return None;
        }
        let mut answer = Answer::empty(Code::Ok);
        if wanted == kind::PTR {
            names.sort();
            names.dedup();
            let record = |target| Record { name: name.to_owned(), ttl: TTL, data: Data::Ptr(target) };
            answer.answers = names.into_iter().map(record).collect();
        } else {
            answer.authority.push(self.start());
        }
        Some(answer)
    }
}

/// What of a Service is asked for.
#[derive(Debug, Default)]
struct Asked<'a> {
    endpoint: Option<&'a str>,
    /// A port and its protocol.
    port: Option<(&'a str, &'a str)>,
}

impl Asked<'_> {
    fn is_port(&self, name: Option<&str>, protocol: Option<&str>) -> bool {
        self.port.is_none_or(|(port, proto)| {
            name.is_some_and(|name| name.eq_ignore_ascii_case(port))
                && protocol.unwrap_or("TCP").eq_ignore_ascii_case(proto)
        })
    }
}

/// The cluster IPs of a Service; none for one without a head.
pub(crate) fn cluster_ips(spec: &ServiceSpec) -> impl Iterator<Item = IpAddr> {
    let several = spec.cluster_ips.iter().flatten();
    let single = spec.cluster_ip.iter().filter(|_| spec.cluster_ips.as_ref().is_none_or(Vec::is_empty));
    several.chain(single).filter_map(|text| text.parse().ok())
}

/// A Service's own addresses with each of the ports that are asked for.
fn fronts(spec: &ServiceSpec, full: &str, ips: &[IpAddr], asked: &Asked<'_>) -> Vec<Place> {
    let ports = spec.ports.iter().flatten();
    let ports = ports.filter(|port| asked.is_port(port.name.as_deref(), port.protocol.as_deref()));
    let place =
        |port: Option<u16>, address: &IpAddr| Place { name: full.to_owned(), address: *address, port };
    ports.flat_map(|port| ips.iter().map(move |ip| place(u16::try_from(port.port).ok(), ip))).collect()
}

/// The endpoints that clients may be sent to.
fn ready(slice: &EndpointSlice) -> impl Iterator<Item = (&Endpoint, IpAddr)> {
    let ready = |endpoint: &&Endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    };
    let address = |endpoint: &Endpoint| endpoint.addresses.first().and_then(|text| text.parse().ok());
    slice.endpoints.iter().flatten().filter(ready).filter_map(move |one| Some((one, address(one)?)))
}

/// The name of an endpoint within its Service.
fn own_name(endpoint: &Endpoint, address: IpAddr) -> String {
    match endpoint.hostname.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => name.to_lowercase(),
        None => address.to_string().replace(['.', ':'], "-"),
    }
}

/// The address a name in one of the reverse trees stands for.
fn reversed(name: &str) -> Option<IpAddr> {
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
