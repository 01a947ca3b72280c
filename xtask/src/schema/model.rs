//! The generator's model of a type.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Definitions by name.
pub type Definitions = BTreeMap<String, Definition>;

#[derive(Debug, Default, Clone)]
pub struct Definition {
    /// Full name, such as `io.k8s.api.core.v1.PodSpec`.
    pub name: String,
    pub description: String,
    pub atomic: bool,
    /// `<group>/<version>/<kind>`.
    pub kinds: Vec<String>,
    pub union: Option<String>,
    pub fields: Vec<Field>,
}

#[derive(Debug, Default, Clone)]
pub struct Field {
    pub name: String,
    pub description: String,
    /// The shape; type names in it are full names.
    pub shape: String,
    /// The tags of the embedded messages on the path, then the field's own tag.
    pub tag: Vec<u32>,
    pub required: bool,
    pub pointer: bool,
    pub always: bool,
    /// A struct that is neither `pointer` nor `always`.
    pub value: bool,
    pub list: String,
    pub map: String,
    pub strategy: String,
    pub key: String,
    /// The values of a string enum, separated by commas.
    pub values: String,
    /// The Go type, if the shape does not determine it.
    pub go: String,
    pub default: String,
}

/// The package part of a definition name.
pub fn package(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(package, _)| package)
}

/// Types that are not JSON objects are scalars with a name of their own.
pub fn scalar(name: &str) -> Option<&'static str> {
    Some(match name {
        "io.k8s.apimachinery.pkg.api.resource.Quantity" => "quantity",
        "io.k8s.apimachinery.pkg.apis.meta.v1.Time" => "time",
        "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime" => "microtime",
        "io.k8s.apimachinery.pkg.apis.meta.v1.Duration" => "duration",
        "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1" => "fields",
        "io.k8s.apimachinery.pkg.apis.meta.v1.Patch" => "json",
        "io.k8s.apimachinery.pkg.runtime.RawExtension" => "raw",
        "io.k8s.apimachinery.pkg.util.intstr.IntOrString" => "intorstring",
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON" => "json",
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrArray" => "schemaorarray",
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrBool" => "schemaorbool",
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaPropsOrStringArray" => {
            "schemaorstrings"
        }
        _ => return None,
    })
}

impl Definition {
    pub fn short_name(&self) -> &str {
        &self.name[package(&self.name).len() + 1..]
    }

    pub fn is_scalar(&self) -> bool {
        scalar(&self.name).is_some()
    }

    pub fn to_text(&self) -> String {
        let mut text = format!("type {}", self.short_name());
        if self.atomic {
            text.push_str(" atomic");
        }
        if let Some(union) = &self.union {
            let _ = write!(text, " union={union}");
        }
        for kind in &self.kinds {
            let _ = write!(text, " kind={kind}");
        }
        text.push('\n');
        for field in &self.fields {
            field.write(package(&self.name), &mut text);
        }
        text
    }
}

impl Field {
    /// Whether upstream has a struct here. Go's `omitempty` never omits a struct.
    pub fn is_struct(&self) -> bool {
        !self.shape.starts_with(['[', '{'])
            && !matches!(self.shape.as_str(), "string" | "bytes" | "bool" | "int32" | "int64" | "double")
    }

    fn write(&self, package: &str, text: &mut String) {
        let tag: Vec<String> = self.tag.iter().map(u32::to_string).collect();
        let tag = if tag.is_empty() { "0".to_owned() } else { tag.join(".") };
        let shape = match self.shape.rfind(['}', ']']) {
            Some(end) => self.shape.split_at(end + 1),
            None => ("", self.shape.as_str()),
        };
        let prefix = format!("{package}.");
        let base = shape.1.strip_prefix(&prefix).filter(|rest| !rest.contains('.')).unwrap_or(shape.1);
        let _ = write!(text, " {} {tag} {}{base}", self.name, shape.0);
        for (flag, set) in [("required", self.required), ("pointer", self.pointer), ("always", self.always)] {
            if set {
                let _ = write!(text, " {flag}");
            }
        }
        let words = [
            ("list", &self.list),
            ("map", &self.map),
            ("strategy", &self.strategy),
            ("key", &self.key),
            ("enum", &self.values),
            ("go", &self.go),
            ("default", &self.default),
        ];
        for (word, value) in words {
            if !value.is_empty() {
                let _ = write!(text, " {word}={value}");
            }
        }
        text.push('\n');
    }
}
