//! Generates values of any kind from the schema table.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::{Map, Value};

use super::super::has_protobuf;
use crate::kubernetes;
use crate::table::{Shape, TypeId};

/// Any kind with a protobuf encoding, and a value of it. The value is generated from a seed, because
/// proptest strategies for recursive types would be too deep.
pub fn any_kind() -> impl Strategy<Value = (TypeId, Value)> {
    let table = kubernetes();
    let kinds: Vec<TypeId> = table
        .types()
        .filter(|(id, ty)| !ty.kinds.is_empty() && has_protobuf(table, *id))
        .map(|(id, _)| id)
        .collect();
    (proptest::sample::select(kinds), any::<u64>()).prop_map(|(id, seed)| {
        let value = RandomSource(seed | 1).any_struct(id, 0);
        (id, value)
    })
}

/// A small pseudo-random number generator (xorshift).
struct RandomSource(u64);

impl RandomSource {
    fn next(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn any_struct(&mut self, id: TypeId, depth: u64) -> Value {
        let mut object = Map::new();
        for field in kubernetes().get(id).fields.iter().filter(|field| field.tag != 0) {
            // Deeper fields are rarer, so that values stay finite.
            if self.next(2 + depth) == 0 {
                let is_schema_or = kubernetes().schema_or(id, &field.name).is_some();
                if !is_schema_or {
                    object.insert(field.name.to_string(), self.any_value(&field.shape, depth));
                }
            }
        }
        Value::Object(object)
    }

    fn any_value(&mut self, shape: &Shape, depth: u64) -> Value {
        match shape {
            Shape::String => Value::from(
                [
                    "",
                    "a",
                    "ü",
                    "long enough for two bytes of length, which takes more than a hundred and twenty-seven characters to be sure of it, so here are more",
                ][self.next(4) as usize],
            ),
            Shape::Bool => Value::from(self.next(2) == 0),
            Shape::Int32 => Value::from([0, 1, -1, i32::MAX, i32::MIN][self.next(5) as usize]),
            Shape::Int64 => Value::from([0, 1, -1, i64::MAX, i64::MIN][self.next(5) as usize]),
            Shape::Double => Value::from([0.0, 1.5, -2.0][self.next(3) as usize]),
            Shape::Bytes => Value::from(STANDARD.encode(vec![7; self.next(4) as usize])),
            Shape::Time => {
                Value::from(["2026-01-01T00:00:00Z", "1969-12-31T23:59:59Z"][self.next(2) as usize])
            }
            Shape::MicroTime => Value::from("2026-01-01T00:00:00.000001Z"),
            Shape::Duration => Value::from("1s"),
            Shape::Quantity => Value::from(["0", "1", "1500m", "2Gi", "1e3"][self.next(5) as usize]),
            Shape::IntOrString => [Value::from(0), Value::from(-3), Value::from("50%"), Value::from("")]
                [self.next(4) as usize]
                .clone(),
            Shape::RawExtension | Shape::FieldsV1 => serde_json::json!({"a": [1, null, 1.5]}),
            Shape::Json => {
                [Value::from(1), Value::from(""), serde_json::json!({})][self.next(3) as usize].clone()
            }
            Shape::Struct(id) => self.any_struct(*id, depth + 1),
            Shape::List { item, .. } => (0..self.next(3)).map(|_| self.any_value(item, depth + 1)).collect(),
            Shape::Map { value, .. } => {
                (0..self.next(3)).map(|at| (format!("k{at}"), self.any_value(value, depth + 1))).collect()
            }
        }
    }
}
