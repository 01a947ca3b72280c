//! Role: rules about resources of its own namespace.

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::{Kind, NameRule};

pub struct Role;

impl Kind for Role {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::rules(obj.items("rules"), true, &Path::new("rules"), errors);
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}
