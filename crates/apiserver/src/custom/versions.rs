//! From the version and schema an object was stored with to those a client sees, and back.

use std::sync::Arc;

use api::custom::{Conversion, Definition, Slot};
use api::json::Json as _;
use api::{Resource, Status};
use serde_json::Value;

use crate::object::{Object, to_stored};
use crate::server::Server;

impl Server {
    /// A stored object as clients of `row` see it: itself, where its bytes are already right.
    pub async fn shown(&self, row: &'static Resource, object: Arc<Object>) -> Result<Arc<Object>, Status> {
        match row.custom {
            Some(slot) => shown(row, slot, object).await,
            None => Ok(object),
        }
    }

    /// The same for many. Most often all of them are right as they are.
    pub async fn shown_all(
        &self,
        row: &'static Resource,
        objects: Vec<Arc<Object>>,
    ) -> Result<Vec<Arc<Object>>, Status> {
        let Some(slot) = row.custom else { return Ok(objects) };
        let mut all = Vec::with_capacity(objects.len());
        for object in objects {
            all.push(shown(row, slot, object).await?);
        }
        Ok(all)
    }

    /// A stored object, decoded, in the version of `row`.
    pub async fn value_of(&self, row: &'static Resource, object: &Arc<Object>) -> Result<Value, Status> {
        Ok(self.shown(row, object.clone()).await?.value())
    }

    /// What to store for an object in the version of `row`.
    pub async fn to_storage(&self, row: &'static Resource, value: Value) -> Result<Value, Status> {
        let Some(slot) = row.custom else { return Ok(value) };
        let definition = slot.definition();
        convert(&definition, value, definition.storage_version()).await
    }

    /// Whether an object that stays as it is would be stored just as it is stored.
    pub fn is_stored_right(&self, row: &'static Resource, object: &Object) -> bool {
        row.custom.is_none_or(|slot| {
            let definition = slot.definition();
            version_of(object) == definition.storage_version() && object.is_clean(definition.serial)
        })
    }
}

/// The version that the stored bytes are in.
fn version_of(object: &Object) -> &str {
    object.api_version().rsplit('/').next().unwrap_or_default()
}

async fn shown(row: &'static Resource, slot: &Slot, object: Arc<Object>) -> Result<Arc<Object>, Status> {
    let definition = slot.definition();
    let same_version = version_of(&object) == row.version;
    if same_version && object.is_clean(definition.serial) {
        return Ok(object);
    }
    let stored = object.value();
    let mut value = stored.clone();
    // By the schema of the version it is stored in, as it is now.
    let version = version_of(&object);
    if definition.version(version).is_some() {
        let form = definition.form(version);
        form.prune(&mut value);
        form.set_defaults(&mut value);
    }
    if value == stored {
        object.mark_clean(definition.serial);
        if same_version {
            return Ok(object);
        }
    }
    let value = convert(&definition, value, row.version).await?;
    let shown = Object::new(object.key.clone(), to_stored(value), object.revision);
    Ok(Arc::new(shown.map_err(Status::internal)?))
}

/// Brings an object to another version of its kind.
async fn convert(definition: &Definition, mut value: Value, version: &str) -> Result<Value, Status> {
    let wanted = format!("{}/{version}", definition.group);
    if value.text("apiVersion") == wanted {
        return Ok(value);
    }
    match &definition.conversion {
        Conversion::None => value.set("apiVersion", wanted),
        Conversion::Webhook(_) => {
            return Err(Status::internal(format!(
                "conversion webhook for {}, Kind={} failed: conversion by webhook is not available",
                value.text("apiVersion"),
                definition.accepted.kind
            )));
        }
    }
    definition.form(version).prune(&mut value);
    Ok(value)
}
