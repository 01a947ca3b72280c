//! The options of lists and watches, and the object selection that they contain.

use std::collections::HashMap;
use std::num::{IntErrorKind, ParseIntError};
use std::time::Duration;

use api::field::{ErrorList, quote};
use api::selector::{FieldSelector, LabelSelector};
use api::{Path, Resource, Status};
use store::Revision;

use crate::cache::Labels;
use crate::object::Object;
use crate::request::{Query, Target};

pub struct ListOptions {
    pub selection: SelectionPredicate,
    /// 0 means no limit.
    pub limit: usize,
    /// The continue token; empty for the first page.
    pub token: String,
    pub version: ResourceVersionMatch,
    pub allow_bookmarks: bool,
    pub send_initial_events: Option<bool>,
    pub timeout: Option<Duration>,
}

/// The resource version semantics of the request (`resourceVersion` and `resourceVersionMatch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceVersionMatch {
    /// Unset: consistent read of all writes acknowledged before the request.
    MostRecent,
    /// `0`: any cached state.
    Any,
    NotOlderThan(Revision),
    Exact(Revision),
}

/// Selects objects of a resource by name, labels and fields.
pub struct SelectionPredicate {
    resource: &'static Resource,
    /// The name of a watch on a single object's path; empty for all objects.
    name: String,
    labels: LabelSelector,
    fields: FieldSelector,
}

impl ListOptions {
    pub fn parse(query: &Query, target: &Target) -> Result<ListOptions, Status> {
        let watch = query.flag("watch").unwrap_or(false) || target.watch;
        let limit = query.int("limit")?.unwrap_or(0).max(0) as usize;
        let seconds = query.int("timeoutSeconds")?.unwrap_or(0).max(0) as u64;
        let send_initial_events = query.flag("sendInitialEvents");
        let version_match = query.get("resourceVersionMatch");
        validate_options(query, watch, send_initial_events)?;
        let requested = read_version(query.get("resourceVersion")).map_err(|message| match watch {
            // Upstream returns different errors for lists and watches.
            true => invalid_version(query.get("resourceVersion"), target),
            false => Status::bad_request(format!("invalid resource version: {message}")),
        })?;
        let version = match (requested, version_match) {
            (None, _) => ResourceVersionMatch::MostRecent,
            (Some(0), _) => ResourceVersionMatch::Any,
            (Some(revision), "Exact") => ResourceVersionMatch::Exact(revision),
            // A first page without resourceVersionMatch is exact, for compatibility.
            (Some(revision), "") if limit > 0 && !watch => ResourceVersionMatch::Exact(revision),
            (Some(revision), _) => ResourceVersionMatch::NotOlderThan(revision),
        };
        Ok(ListOptions {
            selection: SelectionPredicate::parse(query, target)?,
            limit,
            token: query.get("continue").to_owned(),
            version,
            allow_bookmarks: query.flag("allowWatchBookmarks").unwrap_or(false),
            send_initial_events,
            timeout: (seconds > 0).then(|| Duration::from_secs(seconds)),
        })
    }
}

/// Parses a resource version; `None` if empty.
pub fn parse_version(text: &str) -> Result<Option<Revision>, Status> {
    read_version(text).map_err(Status::bad_request)
}

/// Like `parse_version`, with only the message as the error.
pub fn read_version(text: &str) -> Result<Option<Revision>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|error| {
        format!("resourceVersion: Invalid value: {}: {}", quote(text), parse_error(text, &error))
    })
}

fn parse_error(text: &str, error: &ParseIntError) -> String {
    let kind = match error.kind() {
        IntErrorKind::PosOverflow => "value out of range",
        _ => "invalid syntax",
    };
    format!("strconv.ParseUint: parsing {}: {kind}", quote(text))
}

fn invalid_version(text: &str, target: &Target) -> Status {
    let mut errors = ErrorList::default();
    let message = text.parse::<Revision>().err().map_or_else(String::new, |error| parse_error(text, &error));
    errors.invalid(&Path::new("resourceVersion"), text, &message);
    Status::invalid(target.resource.group, target.resource.plural, &target.name, &errors)
}

fn validate_options(query: &Query, watch: bool, send_initial_events: Option<bool>) -> Result<(), Status> {
    let mut errors = ErrorList::default();
    let version_match = query.get("resourceVersionMatch");
    let path = Path::new("resourceVersionMatch");
    if watch {
        if send_initial_events.is_some() && version_match != "NotOlderThan" {
            errors
                .forbidden(&path, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
        }
        if !version_match.is_empty() {
            if send_initial_events.is_none() {
                errors.forbidden(
                    &path,
                    "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                );
            }
            if version_match != "NotOlderThan" {
                errors.not_supported(&path, version_match, &["NotOlderThan"]);
            }
            if !query.get("continue").is_empty() {
                errors.forbidden(&path, "resourceVersionMatch is forbidden when continue is provided");
            }
        }
    } else {
        if !version_match.is_empty() {
            if query.get("resourceVersion").is_empty() {
                errors
                    .forbidden(&path, "resourceVersionMatch is forbidden unless resourceVersion is provided");
            }
            if !query.get("continue").is_empty() {
                errors.forbidden(&path, "resourceVersionMatch is forbidden when continue is provided");
            }
            if version_match != "Exact" && version_match != "NotOlderThan" {
                errors.not_supported(&path, version_match, &["Exact", "NotOlderThan", ""]);
            }
            if version_match == "Exact" && query.get("resourceVersion") == "0" {
                errors.forbidden(
                    &path,
                    "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
                );
            }
        }
        if send_initial_events.is_some() {
            errors.forbidden(&Path::new("sendInitialEvents"), "sendInitialEvents is forbidden for list");
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(Status::invalid("meta.k8s.io", "ListOptions", "", &errors)) }
}

impl SelectionPredicate {
    pub fn parse(query: &Query, target: &Target) -> Result<SelectionPredicate, Status> {
        let bad = |error: String| Status::bad_request(error);
        let labels = LabelSelector::parse(query.get("labelSelector")).map_err(|e| bad(e.to_string()))?;
        let fields = FieldSelector::parse(query.get("fieldSelector")).map_err(|e| bad(e.to_string()))?;
        let resource = target.resource;
        check_fields(resource, &fields)?;
        if !target.name.is_empty() && fields.exact("metadata.name").is_some_and(|name| name != target.name) {
            return Err(Status::bad_request("fieldSelector metadata.name doesn't match requested name"));
        }
        Ok(SelectionPredicate { resource, name: target.name.clone(), labels, fields })
    }

    /// The only name that a selected object can have, if the selection determines it.
    pub fn exact_name(&self) -> Option<&str> {
        if self.name.is_empty() { self.fields.exact("metadata.name") } else { Some(&self.name) }
    }

    /// The labels that every selected object must have.
    pub fn exact_labels(&self) -> Labels {
        let required = self.labels.requirements().iter();
        let exact =
            required.filter_map(|term| Some((term.key.clone(), self.labels.exact(&term.key)?.into())));
        Labels::new(exact.collect())
    }

    pub fn is_everything(&self) -> bool {
        self.name.is_empty() && self.labels.is_everything() && self.fields.is_everything()
    }

    /// Whether matching needs the fields of custom resources, which means decoding the object.
    pub fn needs_decoding(&self) -> bool {
        let by_name = |name: &str| matches!(name, "metadata.name" | "metadata.namespace");
        self.resource.custom.is_some() && self.fields.terms().iter().any(|term| !by_name(&term.field))
    }

    pub fn matches(&self, object: &Object) -> bool {
        (self.name.is_empty() || self.name == object.name())
            && (self.labels.is_everything() || self.labels.matches(|name| object.label(name)))
            && (self.fields.is_everything() || self.fields_match(object))
    }

    fn fields_match(&self, object: &Object) -> bool {
        let Some(crd) = self.resource.custom.filter(|_| self.needs_decoding()) else {
            return self.fields.matches(|name| Some(self.field(object, name)));
        };
        // The selectable fields of a definition may change, so nothing is cached.
        let (version_schema, value) = (crd.version_schema(), object.value());
        let found: HashMap<&str, String> = version_schema
            .selectable_fields
            .iter()
            .filter_map(|(name, _)| Some((name.as_str(), version_schema.field_value(name, &value)?)))
            .collect();
        self.fields
            .matches(|name| Some(found.get(name).map_or_else(|| self.field(object, name), String::as_str)))
    }

    fn field<'a>(&self, object: &'a Object, name: &str) -> &'a str {
        match name {
            "metadata.name" => object.name(),
            "metadata.namespace" if self.resource.namespaced => object.namespace(),
            "metadata.namespace" => "",
            name => {
                let rules = crate::registry::stored_as(self.resource).strategy;
                let name = self.resource.strategy.stored_field(name);
                object.fields(rules).iter().find(|(field, _)| *field == name).map_or("", |(_, value)| value)
            }
        }
    }
}

fn check_fields(resource: &'static Resource, fields: &FieldSelector) -> Result<(), Status> {
    let known = resource.strategy.selectable_fields(&serde_json::Value::Null);
    let custom = resource.custom.map(|crd| crd.version_schema());
    for term in fields.terms() {
        let name = term.field.as_str();
        if matches!(name, "metadata.name" | "metadata.namespace")
            || known.iter().any(|(field, _)| *field == name)
            || custom
                .iter()
                .any(|version_schema| version_schema.selectable_fields.iter().any(|(field, _)| field == name))
        {
            continue;
        }
        if custom.is_some() {
            return Err(Status::bad_request(format!("field label not supported: {name}")));
        }
        return Err(Status::bad_request(if known.is_empty() {
            format!("{name:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
        } else {
            format!("field label not supported: {name}")
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;

    #[track_caller]
    fn check(query: &str, expected: Result<ResourceVersionMatch, &str>) {
        let pods = Registry::new(&[]).unwrap().find("", "v1", "pods").unwrap();
        let found = ListOptions::parse(&Query::parse(query), &Target::collection(pods, "x"));
        let found = found
            .map(|options| options.version)
            .map_err(|status| format!("{} {}", status.code, status.message));
        assert_eq!(found.as_ref().map(|version| *version).map_err(String::as_str), expected, "{query}");
    }

    #[test]
    fn resource_version_options_select_match() {
        check("", Ok(ResourceVersionMatch::MostRecent));
        check("resourceVersion=0", Ok(ResourceVersionMatch::Any));
        check("resourceVersion=5", Ok(ResourceVersionMatch::NotOlderThan(5)));
        check("resourceVersion=5&limit=1", Ok(ResourceVersionMatch::Exact(5)));
        check(
            "resourceVersion=5&limit=1&resourceVersionMatch=NotOlderThan",
            Ok(ResourceVersionMatch::NotOlderThan(5)),
        );
        check("resourceVersion=5&limit=1&watch=1", Ok(ResourceVersionMatch::NotOlderThan(5)));
        check("resourceVersion=5&resourceVersionMatch=Exact", Ok(ResourceVersionMatch::Exact(5)));
        let message = r#"strconv.ParseUint: parsing "x": invalid syntax"#;
        check(
            "resourceVersion=x",
            Err(&format!(r#"400 invalid resource version: resourceVersion: Invalid value: "x": {message}"#)),
        );
        check(
            "resourceVersion=x&watch=1",
            Err(&format!(r#"422 pods "" is invalid: resourceVersion: Invalid value: "x": {message}"#)),
        );
        check(
            "sendInitialEvents=true",
            Err(
                r#"422 ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"#,
            ),
        );
        check(
            "watch=1&sendInitialEvents=true",
            Err(
                r#"422 ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"#,
            ),
        );
    }
}
