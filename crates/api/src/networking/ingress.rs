//! Ingress: REST strategy and validation.

use serde_json::Value;

use super::ip;
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::RestStrategy;

pub struct Ingress;

const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";
const PATH_TYPES: &[&str] = &["Exact", "ImplementationSpecific", "Prefix"];

impl RestStrategy for Ingress {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        let ingress_rules = spec.items("rules");
        if ingress_rules.is_empty() && !spec.has("defaultBackend") {
            let detail = "either `defaultBackend` or `rules` must be specified";
            errors.invalid(&path, spec.at("rules").clone(), detail);
        }
        if spec.has("defaultBackend") {
            validate_backend(spec.at("defaultBackend"), &path.child("defaultBackend"), errors);
        }
        for (i, rule) in ingress_rules.iter().enumerate() {
            check_rule(rule, &path.child("rules").index(i), errors);
        }
        for (i, tls) in spec.items("tls").iter().enumerate() {
            let path = path.child("tls").index(i);
            for (j, host) in tls.items("hosts").iter().enumerate() {
                host_name(host.as_str().unwrap_or(""), &path.child("hosts").index(j), errors);
            }
            if !tls.text("secretName").is_empty() {
                let secret = tls.text("secretName");
                rules::validate_name(secret, names::dns1123_subdomain, &path.child("secretName"), errors);
            }
        }
        if let Some(class) = spec.at("ingressClassName").as_str() {
            rules::validate_name(class, names::dns1123_subdomain, &path.child("ingressClassName"), errors);
        }
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        let class = new.path("spec.ingressClassName").as_str();
        if let (Some(class), Some(annotation)) =
            (class, rules::annotations(new).at(CLASS_ANNOTATION).as_str())
            && class != annotation
        {
            let path = Path::new("annotations").child(CLASS_ANNOTATION);
            errors.invalid(&path, annotation, "must match `ingressClassName` when both are specified");
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let path = Path::new("status.loadBalancer.ingress");
        for (i, ingress) in new.path("status.loadBalancer").items("ingress").iter().enumerate() {
            let path = path.index(i);
            if !ingress.text("ip").is_empty() {
                rules::validate_name(ingress.text("ip"), names::ip_any_form, &path.child("ip"), errors);
            }
            let host = ingress.text("hostname");
            if !host.is_empty() {
                rules::validate_name(host, names::dns1123_subdomain, &path.child("hostname"), errors);
                not_an_ip(host, &path.child("hostname"), errors);
            }
        }
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let annotated = rules::annotations(new).has(CLASS_ANNOTATION);
        if old.is_some() || !annotated || new.at("spec").has("ingressClassName") {
            return Vec::new();
        }
        vec![format!(
            "annotation \"{CLASS_ANNOTATION}\" is deprecated, please use 'spec.ingressClassName' instead"
        )]
    }
}

fn host_name(host: &str, path: &Path, errors: &mut ErrorList) {
    let rule = if host.contains('*') { names::wildcard_dns1123_subdomain } else { names::dns1123_subdomain };
    rules::validate_name(host, rule, path, errors);
}

fn not_an_ip(host: &str, path: &Path, errors: &mut ErrorList) {
    if ip::parse(host).is_some() {
        errors.invalid(path, host, "must be a DNS name, not an IP address");
    }
}

fn check_rule(rule: &Value, path: &Path, errors: &mut ErrorList) {
    let host = rule.text("host");
    if !host.is_empty() {
        not_an_ip(host, &path.child("host"), errors);
        host_name(host, &path.child("host"), errors);
    }
    let http = rule.at("http");
    if http.is_null() {
        return;
    }
    let path = path.child("http.paths");
    if http.items("paths").is_empty() {
        errors.required(&path, "");
    }
    for (i, http_path) in http.items("paths").iter().enumerate() {
        check_path(http_path, &path.index(i), errors);
    }
}

fn check_path(http_path: &Value, path: &Path, errors: &mut ErrorList) {
    let text = http_path.text("path");
    let at = path.child("path");
    let Some(kind) = http_path.at("pathType").as_str() else {
        errors.required(&path.child("pathType"), "pathType must be specified");
        return;
    };
    let strict = matches!(kind, "Exact" | "Prefix");
    if !PATH_TYPES.contains(&kind) {
        errors.not_supported(&path.child("pathType"), kind, PATH_TYPES);
    } else if !text.starts_with('/') && (strict || !text.is_empty()) {
        errors.invalid(&at, text, "must be an absolute path");
    }
    if strict {
        for sequence in ["//", "/./", "/../", "%2f", "%2F"] {
            if text.contains(sequence) {
                errors.invalid(&at, text, &format!("must not contain '{sequence}'"));
            }
        }
        for suffix in ["/..", "/."] {
            if text.ends_with(suffix) {
                errors.invalid(&at, text, &format!("cannot end with '{suffix}'"));
            }
        }
    }
    validate_backend(http_path.at("backend"), &path.child("backend"), errors);
}

fn validate_backend(backend: &Value, path: &Path, errors: &mut ErrorList) {
    let (resource, service) = (backend.at("resource"), backend.at("service"));
    match (resource.is_null(), service.is_null()) {
        (false, false) => errors.invalid(path, "", "cannot set both resource and service backends"),
        (true, true) => errors.invalid(path, "", "resource or service backend is required"),
        (false, true) => validate_object_reference(resource, &path.child("resource"), errors),
        (true, false) => {
            let name_path = path.child("service.name");
            rules::validate_required_name(service.text("name"), names::dns1123_label, &name_path, errors);
            let port = service.at("port");
            match (port.text("name"), port.int("number").unwrap_or(0)) {
                ("", 0) => errors.required(path, "port name or number is required"),
                ("", number) => {
                    rules::validate_port_number(number, &path.child("service.port.number"), errors)
                }
                (name, 0) => {
                    rules::validate_name(name, names::port_name, &path.child("service.port.name"), errors);
                }
                _ => errors.invalid(path, "", "cannot set both port name & port number"),
            }
        }
    }
}

/// Validates a reference with group, kind and name.
pub(super) fn validate_object_reference(reference: &Value, path: &Path, errors: &mut ErrorList) {
    if let Some(group) = reference.at("apiGroup").as_str() {
        rules::validate_name(group, names::dns1123_subdomain, &path.child("apiGroup"), errors);
    }
    for field in ["kind", "name"] {
        rules::validate_required_name(
            reference.text(field),
            names::path_segment_name,
            &path.child(field),
            errors,
        );
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, lines, parse};

    #[test]
    fn validates_ingresses() {
        check(
            &Ingress,
            r#"{"spec": {"rules": [{"host": "*.example.com", "http": {"paths": [{"path": "/", "pathType": "Prefix",
                "backend": {"service": {"name": "1a", "port": {"number": 80}}}}]}}],
                "tls": [{"hosts": ["example.com"], "secretName": "s"}]}}"#,
            &expect![""],
        );
        check(
            &Ingress,
            r#"{"spec": {}}"#,
            &expect![[r#"
            spec: Invalid value: null: either `defaultBackend` or `rules` must be specified
        "#]],
        );
        check(
            &Ingress,
            r#"{"metadata": {"annotations": {"kubernetes.io/ingress.class": "a"}},
                "spec": {"ingressClassName": "b", "defaultBackend": {},
                "rules": [{"host": "1.2.3.4", "http": {}}, {"host": "*"},
                {"http": {"paths": [{"pathType": "Prefix", "path": "a//b/.", "backend": {"service": {"port": {"name": "a", "number": 1}}}},
                                    {"pathType": "Odd", "backend": {"resource": {"name": "x/y"}}}, {}]}}],
                "tls": [{"hosts": ["A"], "secretName": "A"}]}}"#,
            &expect![[r#"
                spec.defaultBackend: Invalid value: "": resource or service backend is required
                spec.rules[0].host: Invalid value: "1.2.3.4": must be a DNS name, not an IP address
                spec.rules[0].http.paths: Required value
                spec.rules[1].host: Invalid value: "*": a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\*\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
                spec.rules[2].http.paths[0].path: Invalid value: "a//b/.": must be an absolute path
                spec.rules[2].http.paths[0].path: Invalid value: "a//b/.": must not contain '//'
                spec.rules[2].http.paths[0].path: Invalid value: "a//b/.": cannot end with '/.'
                spec.rules[2].http.paths[0].backend.service.name: Required value
                spec.rules[2].http.paths[0].backend: Invalid value: "": cannot set both port name & port number
                spec.rules[2].http.paths[1].pathType: Unsupported value: "Odd": supported values: "Exact", "ImplementationSpecific", "Prefix"
                spec.rules[2].http.paths[1].backend.resource.kind: Required value
                spec.rules[2].http.paths[1].backend.resource.name: Invalid value: "x/y": may not contain '/'
                spec.rules[2].http.paths[2].pathType: Required value: pathType must be specified
                spec.tls[0].hosts[0]: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
                spec.tls[0].secretName: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
                annotations.kubernetes.io/ingress.class: Invalid value: "a": must match `ingressClassName` when both are specified
            "#]],
        );
    }

    #[test]
    fn validates_status() {
        let obj =
            parse(r#"{"status": {"loadBalancer": {"ingress": [{"ip": "x"}, {"hostname": "1.2.3.4"}]}}}"#);
        let mut errors = ErrorList::default();
        Ingress.validate_status_update(&obj, &obj, &mut errors);
        expect![[r#"
            status.loadBalancer.ingress[0].ip: Invalid value: "x": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
            status.loadBalancer.ingress[1].hostname: Invalid value: "1.2.3.4": must be a DNS name, not an IP address
        "#]]
        .assert_eq(&lines(&errors));
    }
}
