//! The parameters of operations: path parameters, and the fields of the options types.

use schema::openapi::Definitions;
use schema::{Shape, kubernetes};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub location: ParameterLocation,
    pub description: String,
    pub kind: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParameterLocation {
    Path,
    Query,
}

impl ParameterLocation {
    pub fn as_str(self) -> &'static str {
        match self {
            ParameterLocation::Path => "path",
            ParameterLocation::Query => "query",
        }
    }
}

/// Builds the parameters of operations.
pub struct Parameters<'d> {
    pub definitions: &'d Definitions,
}

impl Parameters<'_> {
    pub fn name_of(kind: &str) -> Parameter {
        path("name", &format!("name of the {kind}"))
    }

    pub fn namespace() -> Parameter {
        path("namespace", "object name and auth scope, such as for teams and projects")
    }

    pub fn proxy_path() -> Parameter {
        path("path", "path to the resource")
    }

    pub fn pretty() -> Parameter {
        Parameter {
            name: "pretty".into(),
            location: ParameterLocation::Query,
            description: "If 'true', then the output is pretty printed. Defaults to 'false' unless the \
                          user-agent indicates a browser or command-line HTTP tool (curl and wget)."
                .into(),
            kind: "string",
        }
    }

    pub fn create(&self) -> Vec<Parameter> {
        self.options(&format!("{META}.CreateOptions"))
    }

    pub fn update(&self) -> Vec<Parameter> {
        self.options(&format!("{META}.UpdateOptions"))
    }

    pub fn patch(&self) -> Vec<Parameter> {
        self.options(&format!("{META}.PatchOptions"))
    }

    pub fn delete(&self) -> Vec<Parameter> {
        self.options(&format!("{META}.DeleteOptions"))
    }

    pub fn list(&self) -> Vec<Parameter> {
        self.options(&format!("{META}.ListOptions"))
    }

    pub fn delete_collection(&self) -> Vec<Parameter> {
        let mut parameters = self.delete();
        let watch = |name: &str| name == "watch" || name == "allowWatchBookmarks";
        parameters.extend(self.list().into_iter().filter(|parameter| !watch(&parameter.name)));
        parameters
    }

    /// The fields of an options type that can be query parameters.
    pub fn options(&self, name: &str) -> Vec<Parameter> {
        let Some(id) = kubernetes().type_by_name(name) else { return Vec::new() };
        let fields = kubernetes().get(id).fields.iter();
        let fields = fields.filter(|field| &*field.name != "kind" && &*field.name != "apiVersion");
        fields
            .filter_map(|field| {
                let kind = match &field.shape {
                    Shape::List { item, .. } => type_name(item)?,
                    shape => type_name(shape)?,
                };
                Some(Parameter {
                    name: field.name.to_string(),
                    location: ParameterLocation::Query,
                    description: self.definitions.describe(name, Some(&field.name)),
                    kind,
                })
            })
            .collect()
    }
}

fn type_name(shape: &Shape) -> Option<&'static str> {
    Some(match shape {
        Shape::String => "string",
        Shape::Bool => "boolean",
        Shape::Int32 | Shape::Int64 => "integer",
        _ => return None,
    })
}

fn path(name: &str, description: &str) -> Parameter {
    Parameter {
        name: name.into(),
        location: ParameterLocation::Path,
        description: description.into(),
        kind: "string",
    }
}
