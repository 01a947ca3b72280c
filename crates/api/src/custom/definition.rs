//! A CustomResourceDefinition without its schemas.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::{ScalePaths, VersionSchema};

/// A stored CRD, decoded as far as serving its objects needs.
#[derive(Debug)]
pub struct Definition {
    /// A process-wide serial number of this state of the definition.
    pub serial: u32,
    pub name: String,
    pub uid: String,
    pub group: String,
    pub namespaced: bool,
    /// The requested names (`spec.names`).
    pub spec_names: CrdNames,
    /// The accepted names (`status.acceptedNames`).
    pub accepted_names: CrdNames,
    pub preserve_unknown: bool,
    pub versions: Vec<Version>,
    pub conversion: Conversion,
    /// `status.conditions`.
    pub conditions: Vec<Value>,
    pub deleting: bool,
    pub finalizers: Vec<String>,
    /// The `api-approved.kubernetes.io` annotation of CRDs in reserved groups.
    pub approval: Option<String>,
    source: Bytes,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CrdNames {
    pub plural: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub singular: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub short_names: Vec<String>,
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub list_kind: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub categories: Vec<String>,
}

#[derive(Debug)]
pub struct Version {
    pub name: String,
    pub served: bool,
    pub storage: bool,
    /// The warning for requests to a deprecated version.
    pub deprecation: Option<String>,
    pub has_status: bool,
    pub scale: Option<ScalePaths>,
    version_schema: OnceLock<Arc<VersionSchema>>,
}

/// The conversion between versions.
#[derive(Clone, Debug, PartialEq)]
pub enum Conversion {
    /// Changes only `apiVersion`.
    None,
    /// Calls a webhook: `spec.conversion.webhook`.
    Webhook(Value),
}

impl Definition {
    /// Decodes a stored CRD.
    pub fn parse(source: Bytes) -> Result<Definition, serde_json::Error> {
        let raw: RawDefinition = serde_json::from_slice(&source)?;
        let warning = |version: &RawVersion| {
            version.deprecated.then(|| {
                let message = version.deprecation_warning.clone();
                message.unwrap_or_else(|| deprecation_warning(&raw.spec, &version.name))
            })
        };
        let versions = raw.spec.versions.iter().map(|version| Version {
            name: version.name.clone(),
            served: version.served,
            storage: version.storage,
            deprecation: warning(version),
            has_status: version.subresources.status.is_some(),
            scale: version.subresources.scale.clone(),
            version_schema: OnceLock::new(),
        });
        Ok(Definition {
            serial: next_serial(),
            versions: versions.collect(),
            name: raw.metadata.name,
            uid: raw.metadata.uid,
            deleting: raw.metadata.deletion_timestamp.is_some(),
            finalizers: raw.metadata.finalizers,
            approval: raw
                .metadata
                .annotations
                .get("api-approved.kubernetes.io")
                .and_then(Value::as_str)
                .map(str::to_owned),
            conversion: match raw.spec.conversion {
                Some(RawConversion { strategy, webhook }) if strategy == "Webhook" => {
                    Conversion::Webhook(webhook)
                }
                _ => Conversion::None,
            },
            group: raw.spec.group,
            namespaced: raw.spec.scope == "Namespaced",
            spec_names: raw.spec.names,
            preserve_unknown: raw.spec.preserve_unknown_fields,
            accepted_names: raw.status.accepted_names,
            conditions: raw.status.conditions,
            source,
        })
    }

    /// The definition with new names and conditions.
    pub fn with_status(&self, accepted_names: CrdNames, conditions: Vec<Value>) -> Definition {
        let mut updated = self.copy();
        updated.accepted_names = accepted_names;
        updated.conditions = conditions;
        updated
    }

    /// A definition without its schemas, for requests still in flight after the CRD is deleted.
    pub fn without_source(&self) -> Definition {
        let mut removed = self.copy();
        removed.source = Bytes::new();
        removed
    }

    fn copy(&self) -> Definition {
        let version = |version: &Version| Version {
            name: version.name.clone(),
            deprecation: version.deprecation.clone(),
            scale: version.scale.clone(),
            version_schema: OnceLock::new(),
            ..*version
        };
        Definition {
            serial: next_serial(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            group: self.group.clone(),
            spec_names: self.spec_names.clone(),
            accepted_names: self.accepted_names.clone(),
            versions: self.versions.iter().map(version).collect(),
            conversion: self.conversion.clone(),
            conditions: self.conditions.clone(),
            finalizers: self.finalizers.clone(),
            approval: self.approval.clone(),
            source: self.source.clone(),
            ..*self
        }
    }

    /// Whether all requested names are accepted.
    pub fn are_names_accepted(&self) -> bool {
        super::is_condition_true(&self.conditions, "NamesAccepted")
    }

    /// The version in which objects are stored.
    pub fn storage_version(&self) -> &str {
        self.versions.iter().find(|version| version.storage).map_or("", |version| &version.name)
    }

    pub fn version(&self, name: &str) -> Option<&Version> {
        self.versions.iter().find(|version| version.name == name)
    }

    /// The compiled schema of a version. It is created on first use.
    pub fn version_schema(&self, version: &str) -> Arc<VersionSchema> {
        let create = || Arc::new(VersionSchema::new(self, version, &self.version_spec(version)));
        match self.version(version) {
            Some(version) => version.version_schema.get_or_init(create).clone(),
            None => create(),
        }
    }

    /// The entry of a version in `spec.versions`.
    pub fn version_spec(&self, version: &str) -> Value {
        let mut crd: Value = serde_json::from_slice(&self.source).unwrap_or_default();
        let versions = crd.pointer_mut("/spec/versions").map(Value::take).unwrap_or_default();
        let Value::Array(versions) = versions else { return Value::Null };
        versions.into_iter().find(|found| found["name"] == version).unwrap_or_default()
    }

    /// Whether the resource is served: its names are accepted, or it is established.
    pub fn is_served(&self) -> bool {
        super::is_condition_true(&self.conditions, "NamesAccepted")
            || super::is_condition_true(&self.conditions, "Established")
    }
}

fn next_serial() -> u32 {
    static NEXT_SERIAL: AtomicU32 = AtomicU32::new(1);
    NEXT_SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// The default deprecation warning of a version.
fn deprecation_warning(spec: &RawSpec, deprecated: &str) -> String {
    let kind = &spec.names.kind;
    let group = &spec.group;
    let newer = spec.versions.iter().filter(|version| {
        let newer = crate::names::compare_versions(deprecated, &version.name).is_lt();
        version.served && !version.deprecated && newer
    });
    let best = newer.max_by(|a, b| crate::names::compare_versions(&a.name, &b.name));
    let instead = best.map(|version| format!("; use {group}/{} {kind}", version.name));
    format!("{group}/{deprecated} {kind} is deprecated{}", instead.unwrap_or_default())
}

#[derive(Deserialize)]
struct RawDefinition {
    metadata: RawMetadata,
    spec: RawSpec,
    #[serde(default)]
    status: RawStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawMetadata {
    name: String,
    #[serde(default)]
    uid: String,
    deletion_timestamp: Option<String>,
    #[serde(default)]
    finalizers: Vec<String>,
    #[serde(default)]
    annotations: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawSpec {
    group: String,
    scope: String,
    names: CrdNames,
    versions: Vec<RawVersion>,
    conversion: Option<RawConversion>,
    #[serde(default)]
    preserve_unknown_fields: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawVersion {
    name: String,
    #[serde(default)]
    served: bool,
    #[serde(default)]
    storage: bool,
    #[serde(default)]
    deprecated: bool,
    deprecation_warning: Option<String>,
    #[serde(default)]
    subresources: RawSubresources,
}

#[derive(Default, Deserialize)]
struct RawSubresources {
    status: Option<Value>,
    scale: Option<ScalePaths>,
}

#[derive(Deserialize)]
struct RawConversion {
    #[serde(default)]
    strategy: String,
    #[serde(default)]
    webhook: Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawStatus {
    #[serde(default)]
    accepted_names: CrdNames,
    #[serde(default, deserialize_with = "or_default")]
    conditions: Vec<Value>,
}

/// Decodes null as the default value.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}
