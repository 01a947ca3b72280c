//! From the version and schema an object was stored with to those a client sees, and back.

use std::sync::Arc;

use api::custom::{Conversion, Definition};
use api::json::Json as _;
use api::{Resource, Status};
use serde_json::Value;

use super::webhook;
use crate::object::{Object, to_stored};
use crate::server::Server;

impl Server {
    /// A stored object as clients of `row` see it: itself, where its bytes are already right.
    pub async fn shown(&self, row: &'static Resource, object: Arc<Object>) -> Result<Arc<Object>, Status> {
        if row.custom.is_none() {
            return Ok(object);
        }
        let mut shown = self.shown_all(row, vec![object]).await?;
        shown.pop().ok_or_else(|| Status::internal("a conversion lost an object"))
    }

    /// The same for many. Most often all of them are right as they are.
    pub async fn shown_all(
        &self,
        row: &'static Resource,
        mut objects: Vec<Arc<Object>>,
    ) -> Result<Vec<Arc<Object>>, Status> {
        let Some(slot) = row.custom else { return Ok(objects) };
        let definition = slot.definition();
        let mut others = Vec::new();
        for (i, object) in objects.iter_mut().enumerate() {
            let value = match looked_at(&definition, object) {
                Look::Clean if version_of(object) == row.version => continue,
                Look::Clean => object.value(),
                Look::Changed(value) => value,
            };
            if version_of(object) == row.version {
                *object = remade(object, value)?;
            } else {
                others.push((i, value));
            }
        }
        if others.is_empty() {
            return Ok(objects);
        }
        let (places, values): (Vec<usize>, Vec<Value>) = others.into_iter().unzip();
        let converted = convert(self, &definition, values, row.version).await?;
        for (place, value) in places.into_iter().zip(converted) {
            objects[place] = remade(&objects[place], value)?;
        }
        Ok(objects)
    }

    /// A stored object, decoded, in the version of `row`.
    pub async fn value_of(&self, row: &'static Resource, object: &Arc<Object>) -> Result<Value, Status> {
        Ok(self.shown(row, object.clone()).await?.value())
    }

    /// What to store for an object in the version of `row`.
    pub async fn to_storage(&self, row: &'static Resource, value: Value) -> Result<Value, Status> {
        let Some(slot) = row.custom else { return Ok(value) };
        let definition = slot.definition();
        let version = definition.storage_version();
        if value.text("apiVersion").rsplit('/').next() == Some(version) {
            return Ok(value);
        }
        let mut converted = convert(self, &definition, vec![value], version).await?;
        converted.pop().ok_or_else(|| Status::internal("a conversion lost an object"))
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

/// What the schema of the version an object is stored in, as it is now, makes of it.
enum Look {
    Clean,
    Changed(Value),
}

fn looked_at(definition: &Definition, object: &Object) -> Look {
    if object.is_clean(definition.serial) {
        return Look::Clean;
    }
    let stored = object.value();
    let mut value = stored.clone();
    let version = version_of(object);
    if definition.version(version).is_some() {
        let form = definition.form(version);
        form.prune(&mut value);
        form.set_defaults(&mut value);
    }
    if value == stored {
        object.mark_clean(definition.serial);
        return Look::Clean;
    }
    Look::Changed(value)
}

fn remade(object: &Object, value: Value) -> Result<Arc<Object>, Status> {
    let remade = Object::new(object.key.clone(), to_stored(value), object.revision);
    remade.map(Arc::new).map_err(Status::internal)
}

/// Brings objects, none of which is in it, to another version of their kind.
async fn convert(
    server: &Server,
    definition: &Definition,
    values: Vec<Value>,
    version: &str,
) -> Result<Vec<Value>, Status> {
    let wanted = format!("{}/{version}", definition.group);
    let mut values = match &definition.conversion {
        Conversion::None => values,
        Conversion::Webhook(hook) => webhook::convert(server, definition, hook, values, &wanted).await?,
    };
    let form = definition.form(version);
    for value in &mut values {
        value.set("apiVersion", wanted.as_str());
        form.prune(value);
    }
    Ok(values)
}
