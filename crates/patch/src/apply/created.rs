//! Whoever creates an object owns everything in it: the record of that, written down in one walk.
//!
//! It is what comparing the object with an empty one and printing the difference gives, for objects without anything
//! unusual; creates are too frequent to build three sets of paths for each.

use schema::{Field, ListKind, Shape};
use serde_json::{Map, Value};

use super::fieldset::Set;
use super::fieldsv1::{field_key, key};
use super::typed::{Atom, Fields, Typed};

/// Something [`super::compare`] has to look at.
pub(crate) struct Unusual;

/// What upstream's empty struct has in a place, see [`super::typed::zero`].
enum Zero {
    Nothing,
    /// A struct that is always there.
    Struct,
    Plain(Value),
}

/// Fields that are nobody's, at some level of the object.
#[derive(Clone, Copy)]
pub(crate) struct LeftOut<'s> {
    /// These paths, but not what is below them.
    pub paths: Option<&'s Set>,
    /// These with all that is below them.
    pub trees: Option<&'s Set>,
}

/// The JSON form of all fields a new object sets; empty if there are none.
pub(crate) fn fields(typed: Typed, object: &Value, left_out: LeftOut) -> Result<Map<String, Value>, Unusual> {
    match (typed.atom(object), object) {
        (Atom::Map(fields @ Fields { atomic: false, .. }), Value::Object(object)) if !typed.is_free() => {
            members(fields, true, object, left_out)
        }
        _ => Err(Unusual),
    }
}

fn members(
    fields: Fields,
    always: bool,
    object: &Map<String, Value>,
    left_out: LeftOut,
) -> Result<Map<String, Value>, Unusual> {
    let mut found = Vec::with_capacity(object.len());
    for (name, value) in object {
        let tree = left_out.trees.and_then(|set| set.field(name));
        if tree.is_some_and(|node| node.member) {
            continue;
        }
        let path = left_out.paths.and_then(|set| set.field(name));
        let below = LeftOut {
            paths: path.map(|node| &node.children).filter(|set| !set.is_empty()),
            trees: tree.map(|node| &node.children).filter(|set| !set.is_empty()),
        };
        let zero = fields.declared(name).filter(|_| always).map_or(Zero::Nothing, zero);
        let (member, contents) = walk(fields.child(name), zero, value, below)?;
        let member = member && !path.is_some_and(|node| node.member);
        if member || !contents.is_empty() {
            found.push((field_key(name), printed(member, contents)));
        }
    }
    // Sorted already, so that this is no more than filling nodes.
    Ok(found.into_iter().collect())
}

/// Whether the path to a value belongs to its creator, and what below it does.
fn walk(
    typed: Typed,
    zero: Zero,
    value: &Value,
    left_out: LeftOut,
) -> Result<(bool, Map<String, Value>), Unusual> {
    if matches!(&zero, Zero::Plain(zero) if zero == value) {
        return Ok((false, Map::new()));
    }
    let new = matches!(zero, Zero::Nothing);
    if !new && typed.is_free() {
        return Err(Unusual);
    }
    match (typed.atom(value), value) {
        (Atom::Opaque | Atom::Scalar(_) | Atom::List { kind: ListKind::Atomic, .. }, _)
        | (Atom::Map(Fields { atomic: true, .. }), _) => match zero {
            // An empty value of such a type is compared as a whole.
            Zero::Struct => Err(Unusual),
            _ => Ok((true, Map::new())),
        },
        (Atom::Map(fields), Value::Object(object)) => {
            let is_struct = matches!(zero, Zero::Struct);
            // An empty object in the place of nothing is a value of its own.
            let member = new || (object.is_empty() && !is_struct);
            Ok((member, members(fields, is_struct, object, left_out)?))
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            let mut found = Map::new();
            for value in items {
                let element = item.item_key(kind, value).map_err(|_| Unusual)?;
                let (member, contents) =
                    walk(item, Zero::Nothing, value, LeftOut { paths: None, trees: None })?;
                if found.insert(key(&element), printed(member, contents)).is_some() {
                    return Err(Unusual);
                }
            }
            Ok((new || items.is_empty(), found))
        }
        _ => Err(Unusual),
    }
}

fn printed(member: bool, mut contents: Map<String, Value>) -> Value {
    if member && !contents.is_empty() {
        contents.insert(".".to_owned(), Value::Object(Map::new()));
    }
    Value::Object(contents)
}

fn zero(field: &Field) -> Zero {
    match &field.shape {
        _ if field.tag == 0 => Zero::Nothing,
        _ if field.pointer && field.always => Zero::Plain(Value::Null),
        _ if field.pointer => Zero::Nothing,
        Shape::Struct(_) => Zero::Struct,
        _ if !field.always => Zero::Nothing,
        Shape::String => Zero::Plain(Value::from("")),
        Shape::Bool => Zero::Plain(Value::from(false)),
        Shape::Int32 | Shape::Int64 | Shape::Double => Zero::Plain(Value::from(0)),
        _ => Zero::Plain(Value::Null),
    }
}
