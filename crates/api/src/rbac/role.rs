//! Role: rules about resources of its namespace.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::{NameFormat, RestStrategy};

pub struct Role;

impl RestStrategy for Role {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::validate_rules(obj.items("rules"), true, &Path::new("rules"), errors);
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }
}
