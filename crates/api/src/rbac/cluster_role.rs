//! ClusterRole: cluster-wide rules, optionally aggregated from other ClusterRoles by label.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::strategy::{NameFormat, RestStrategy};

pub struct ClusterRole;

impl RestStrategy for ClusterRole {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::validate_rules(obj.items("rules"), false, &Path::new("rules"), errors);
        let aggregation = obj.at("aggregationRule");
        if aggregation.is_null() {
            return;
        }
        let path = Path::new("aggregationRule.clusterRoleSelectors");
        let selectors = aggregation.items("clusterRoleSelectors");
        if selectors.is_empty() {
            errors.required(&path, "at least one clusterRoleSelector required if aggregationRule is non-nil");
        }
        for (i, selector) in selectors.iter().enumerate() {
            let path = path.index(i);
            let before = errors.0.len();
            meta::validate_label_selector(selector, &path, SelectorOptions::default(), errors);
            if errors.0.len() > before {
                // Upstream prints null for a selector that cannot be parsed.
                errors.invalid(&path, Value::Null, "invalid label selector.");
            }
        }
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }
}
