//! IPAddress: REST strategy and validation.

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::{NameFormat, RestStrategy};
use crate::{meta, names};

pub struct IPAddress;

impl RestStrategy for IPAddress {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let name = obj.at("metadata").text("name");
        if !name.is_empty() {
            rules::validate_name(name, names::ip, &Path::new("metadata.name"), errors);
        }
        let path = Path::new("spec.parentRef");
        let parent = obj.path("spec.parentRef");
        if parent.is_null() {
            errors.required(&path, "");
            return;
        }
        if !parent.text("group").is_empty() {
            rules::validate_name(
                parent.text("group"),
                names::dns1123_subdomain,
                &path.child("group"),
                errors,
            );
        }
        for field in ["resource", "name"] {
            rules::validate_required_name(
                parent.text(field),
                names::path_segment_name,
                &path.child(field),
                errors,
            );
        }
        if !parent.text("namespace").is_empty() {
            let namespace = parent.text("namespace");
            rules::validate_name(namespace, names::path_segment_name, &path.child("namespace"), errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let path = Path::new("spec.parentRef");
        meta::validate_immutable(new.path("spec.parentRef"), old.path("spec.parentRef"), &path, errors);
    }

    /// The name is an IP address, which [`validate`](RestStrategy::validate) checks.
    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_ip_addresses() {
        let good = r#"{"metadata": {"name": "fd00::1"}, "spec": {"parentRef": {"resource": "services", "name": "a", "namespace": "b"}}}"#;
        check(&IPAddress, good, &expect![""]);
        check(
            &IPAddress,
            r#"{"metadata": {"name": "FD00::1"}}"#,
            &expect![[r#"
            metadata.name: Invalid value: "FD00::1": must be in canonical form ("fd00::1")
            spec.parentRef: Required value
        "#]],
        );
        check(
            &IPAddress,
            r#"{"metadata": {"name": "a"}, "spec": {"parentRef": {"name": ".."}}}"#,
            &expect![[r#"
                metadata.name: Invalid value: "a": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
                spec.parentRef.resource: Required value
                spec.parentRef.name: Invalid value: "..": may not be '..'
            "#]],
        );
        check_update(
            &IPAddress,
            good,
            &good.replace("\"a\"", "\"c\""),
            &expect![[r#"
            spec.parentRef: Invalid value: {"name":"c","namespace":"b","resource":"services"}: field is immutable
        "#]],
        );
    }
}
