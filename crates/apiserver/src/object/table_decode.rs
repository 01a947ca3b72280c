//! Decodes an object for tables: skips the large fields of pods that no column reads.

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Fields of pod specs and containers that no column reads. A test checks the columns against them.
pub const SKIPPED_POD_FIELDS: &[&str] = &[
    "affinity",
    "imagePullSecrets",
    "securityContext",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
];
pub const SKIPPED_CONTAINER_FIELDS: &[&str] = &[
    "args",
    "command",
    "env",
    "envFrom",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "volumeDevices",
    "volumeMounts",
];

/// Decodes without the skipped fields; null for invalid JSON.
pub fn decode_for_table(bytes: &[u8]) -> Value {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    Location::Other.deserialize(&mut deserializer).unwrap_or_default()
}

/// The position of a value in the object.
#[derive(Clone, Copy)]
enum Location {
    Metadata,
    Spec,
    Containers,
    Container,
    Other,
}

impl Location {
    fn of_field(field: &str) -> Location {
        match field {
            "metadata" => Location::Metadata,
            "spec" => Location::Spec,
            "containers" | "initContainers" | "ephemeralContainers" => Location::Containers,
            _ => Location::Other,
        }
    }

    fn is_skipped(self, field: &str) -> bool {
        match self {
            Location::Metadata => field == "managedFields",
            Location::Spec => SKIPPED_POD_FIELDS.contains(&field),
            Location::Container => SKIPPED_CONTAINER_FIELDS.contains(&field),
            Location::Containers | Location::Other => false,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Location {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Location {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let item = if matches!(self, Location::Containers) { Location::Container } else { Location::Other };
        let mut list = Vec::new();
        while let Some(value) = items.next_element_seed(item)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            if self.is_skipped(&name) {
                fields.next_value::<IgnoredAny>()?;
            } else {
                let value = fields.next_value_seed(Location::of_field(&name))?;
                map.insert(name, value);
            }
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;

    #[test]
    fn skips_only_listed_fields() {
        let object = json!({
            "metadata": {"name": "a", "labels": {"env": "x"}, "managedFields": [{"manager": "m"}]},
            "spec": {
                "selector": {"matchLabels": {"env": "prod", "volumes": "2"}}, "tolerations": [{}], "nodeName": "n",
                "containers": [{"name": "c", "image": "i", "env": [{"name": "A"}], "ports": [{"containerPort": 80}]}],
            },
            "data": {"env": "1", "command": "2"}, "n": [1, -2, 3.5, true, null, "s"],
        });
        let decoded = json!({
            "metadata": {"name": "a", "labels": {"env": "x"}},
            "spec": {
                "selector": {"matchLabels": {"env": "prod", "volumes": "2"}}, "nodeName": "n",
                "containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 80}]}],
            },
            "data": {"env": "1", "command": "2"}, "n": [1, -2, 3.5, true, null, "s"],
        });
        assert_eq!(decode_for_table(object.to_string().as_bytes()), decoded);
        assert_eq!(decode_for_table(b"{\"a\":"), Value::Null);
    }

    /// The columns of every manifest print the same cells with and without the skipped fields.
    #[test]
    fn columns_do_not_read_skipped_fields() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/tests/manifests");
        let now = Timestamp::UNIX_EPOCH;
        let mut seen = 0;
        for row in api::RESOURCES {
            let group = if row.group.is_empty() { "core" } else { row.group };
            let Ok(text) =
                std::fs::read_to_string(dir.join(format!("{group}.{}.{}.json", row.version, row.kind)))
            else {
                continue;
            };
            let whole: Value = serde_json::from_str(&text).unwrap();
            let cell_values = |value: &Value| api::columns::cells(row.group, row.plural, value, now);
            assert_eq!(cell_values(&decode_for_table(text.as_bytes())), cell_values(&whole), "{}", row.kind);
            seen += 1;
        }
        assert!(seen > 50, "only {seen} manifests were found");
    }
}
