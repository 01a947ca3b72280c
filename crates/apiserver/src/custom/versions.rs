//! Conversion of custom resources between the stored version and schema and those that clients see.

use std::sync::Arc;

use api::custom::{Conversion, Definition};
use api::json::JsonExt as _;
use api::{Resource, Status};
use serde_json::Value;

use super::webhook;
use crate::object::{Object, to_stored};
use crate::server::Server;

impl Server {
    /// A stored object in the version of `row`; the same object if its bytes are already right.
    pub async fn convert_for_request(
        &self,
        row: &'static Resource,
        object: Arc<Object>,
    ) -> Result<Arc<Object>, Status> {
        if row.custom.is_none() {
            return Ok(object);
        }
        let mut converted = self.convert_all_for_request(row, vec![object]).await?;
        converted.pop().ok_or_else(|| Status::internal("conversion returned no object"))
    }

    /// The same for a list. Most often no object needs conversion.
    pub async fn convert_all_for_request(
        &self,
        row: &'static Resource,
        mut objects: Vec<Arc<Object>>,
    ) -> Result<Vec<Arc<Object>>, Status> {
        let Some(crd) = row.custom else { return Ok(objects) };
        let definition = crd.definition();
        let mut others = Vec::new();
        for (i, object) in objects.iter_mut().enumerate() {
            let value = match normalize_stored(&definition, object) {
                NormalizedObject::Unchanged if version_of(object) == row.version => continue,
                NormalizedObject::Unchanged => object.value(),
                NormalizedObject::Changed(value) => value,
            };
            if version_of(object) == row.version {
                *object = replace_value(object, value)?;
            } else {
                others.push((i, value));
            }
        }
        if others.is_empty() {
            return Ok(objects);
        }
        let (indexes, values): (Vec<usize>, Vec<Value>) = others.into_iter().unzip();
        let converted = convert(self, &definition, values, row.version).await?;
        for (index, value) in indexes.into_iter().zip(converted) {
            objects[index] = replace_value(&objects[index], value)?;
        }
        Ok(objects)
    }

    /// A stored object, decoded, in the version of `row`.
    pub async fn value_of(&self, row: &'static Resource, object: &Arc<Object>) -> Result<Value, Status> {
        Ok(self.convert_for_request(row, object.clone()).await?.value())
    }

    /// Converts an object in the version of `row` to the storage version.
    pub async fn to_storage(&self, row: &'static Resource, value: Value) -> Result<Value, Status> {
        let Some(crd) = row.custom else { return Ok(value) };
        let definition = crd.definition();
        let version = definition.storage_version();
        if value.text("apiVersion").rsplit('/').next() == Some(version) {
            return Ok(value);
        }
        let mut converted = convert(self, &definition, vec![value], version).await?;
        converted.pop().ok_or_else(|| Status::internal("conversion returned no object"))
    }

    /// Whether the object, written without changes, would be stored with the same bytes.
    pub fn is_stored_current(&self, row: &'static Resource, object: &Object) -> bool {
        row.custom.is_none_or(|crd| {
            let definition = crd.definition();
            version_of(object) == definition.storage_version() && object.is_clean(definition.serial)
        })
    }
}

/// The version of the stored bytes.
fn version_of(object: &Object) -> &str {
    object.api_version().rsplit('/').next().unwrap_or_default()
}

/// A stored object after pruning and defaulting by the current schema of its version.
enum NormalizedObject {
    Unchanged,
    Changed(Value),
}

fn normalize_stored(definition: &Definition, object: &Object) -> NormalizedObject {
    if object.is_clean(definition.serial) {
        return NormalizedObject::Unchanged;
    }
    let stored = object.value();
    let mut value = stored.clone();
    let version = version_of(object);
    if definition.version(version).is_some() {
        let version_schema = definition.version_schema(version);
        version_schema.prune(&mut value);
        version_schema.set_defaults(&mut value);
    }
    if value == stored {
        object.mark_clean(definition.serial);
        return NormalizedObject::Unchanged;
    }
    NormalizedObject::Changed(value)
}

fn replace_value(object: &Object, value: Value) -> Result<Arc<Object>, Status> {
    let new_object = Object::new(object.key.clone(), to_stored(value), object.revision);
    new_object.map(Arc::new).map_err(Status::internal)
}

/// Converts objects to another version. None of them may be in it already.
async fn convert(
    server: &Server,
    definition: &Definition,
    values: Vec<Value>,
    version: &str,
) -> Result<Vec<Value>, Status> {
    let api_version = format!("{}/{version}", definition.group);
    let mut values = match &definition.conversion {
        Conversion::None => values,
        Conversion::Webhook(hook) => webhook::convert(server, definition, hook, values, &api_version).await?,
    };
    let version_schema = definition.version_schema(version);
    for value in &mut values {
        value.set("apiVersion", api_version.as_str());
        version_schema.prune(value);
    }
    Ok(values)
}
