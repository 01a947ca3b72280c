//! ServiceCIDR: REST strategy and validation.

use serde_json::Value;

use super::ip::Cidr;
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::RestStrategy;

pub struct ServiceCIDR;

impl RestStrategy for ServiceCIDR {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let path = Path::new("spec.cidrs");
        let spec = obj.at("spec");
        let cidrs = cidrs(obj);
        match cidrs.len() {
            0 => return errors.required(&path, "at least one CIDR required"),
            1 | 2 => {}
            _ => return errors.invalid(&path, spec.clone(), "may only hold up to 2 values"),
        }
        for (i, cidr) in cidrs.iter().enumerate() {
            rules::validate_name(cidr, names::cidr, &path.index(i), errors);
        }
        let parsed: Vec<Cidr> = cidrs.iter().filter_map(|cidr| Cidr::parse(cidr)).collect();
        if let [one, other] = parsed[..]
            && one.is_v6() == other.is_v6()
        {
            let detail =
                "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64";
            errors.invalid(&path, spec.at("cidrs").clone(), detail);
        }
    }

    /// A second CIDR may be added; nothing else may change.
    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let path = Path::new("spec.cidrs");
        let (after, before) = (cidrs(new), cidrs(old));
        if after.len() != before.len() && (before.len(), after.len()) != (1, 2) {
            errors.invalid(&path, new.path("spec.cidrs").clone(), "field is immutable");
            return;
        }
        for (i, (after, before)) in after.iter().zip(&before).enumerate() {
            if after != before {
                errors.invalid(&path.index(i), *after, "field is immutable");
            }
        }
    }
}

fn cidrs(obj: &Value) -> Vec<&str> {
    obj.at("spec").items("cidrs").iter().map(|cidr| cidr.as_str().unwrap_or("")).collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_service_cidrs() {
        let one = r#"{"spec": {"cidrs": ["10.0.0.0/24"]}}"#;
        let two = r#"{"spec": {"cidrs": ["10.0.0.0/24", "fd00::/112"]}}"#;
        check(&ServiceCIDR, two, &expect![""]);
        check(
            &ServiceCIDR,
            r#"{"spec": {"cidrs": []}}"#,
            &expect![[r#"
            spec.cidrs: Required value: at least one CIDR required
        "#]],
        );
        check(
            &ServiceCIDR,
            r#"{"spec": {"cidrs": ["10.0.0.0/24", "10.0.1.1/24"]}}"#,
            &expect![[r#"
            spec.cidrs[1]: Invalid value: "10.0.1.1/24": must not have bits set beyond the prefix length
            spec.cidrs: Invalid value: ["10.0.0.0/24","10.0.1.1/24"]: may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64
        "#]],
        );
        check_update(&ServiceCIDR, one, two, &expect![""]);
        check_update(
            &ServiceCIDR,
            two,
            one,
            &expect![[r#"
            spec.cidrs: Invalid value: ["10.0.0.0/24"]: field is immutable
        "#]],
        );
        check_update(
            &ServiceCIDR,
            one,
            r#"{"spec": {"cidrs": ["10.0.1.0/24"]}}"#,
            &expect![[r#"
            spec.cidrs[0]: Invalid value: "10.0.1.0/24": field is immutable
        "#]],
        );
    }
}
