//! ClusterRole: rules about everything, written here or gathered from other ClusterRoles by label.

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::{Kind, NameRule};
use crate::meta::{self, SelectorOptions};

pub struct ClusterRole;

impl Kind for ClusterRole {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::rules(obj.items("rules"), false, &Path::new("rules"), errors);
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
            meta::label_selector(selector, &path, SelectorOptions::default(), errors);
            if errors.0.len() > before {
                // A selector that does not parse is upstream's null.
                errors.invalid(&path, Value::Null, "invalid label selector.");
            }
        }
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}
