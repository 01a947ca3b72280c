//! Writes the managed fields of a new object in a single walk. Its creator owns all fields.
//!
//! The result is the same as comparing the object with an empty one and serializing the difference.
//! Creates are too frequent to build three path sets for each, so this is the fast path for objects
//! without anything unusual.

use schema::{Field, ListType, Shape};
use serde_json::{Map, Value};

use super::field_set::Set;
use super::fields_v1::key;
use super::typed::{Atom, Fields, Typed};

/// The object has something that only [`super::compare`] supports.
pub(crate) struct Unsupported;

/// The value that upstream's empty struct has at a path, see [`super::typed::zero`].
enum Zero {
    Nothing,
    /// A struct that is always present.
    Struct,
    Plain(Value),
}

/// Fields without an owner, relative to a level of the object.
#[derive(Clone, Copy)]
pub(crate) struct ExcludedFields<'s> {
    /// These paths, but not what is below them.
    pub paths: Option<&'s Set>,
    /// These paths with everything below them.
    pub trees: Option<&'s Set>,
}

/// Appends the JSON form of all fields that a new object sets. Returns false if there are none.
pub(crate) fn fields(
    typed: Typed,
    object: &Value,
    excluded: ExcludedFields,
    out: &mut Vec<u8>,
) -> Result<bool, Unsupported> {
    match (typed.atom(object), object) {
        (Atom::Map(fields @ Fields { atomic: false, .. }), Value::Object(object)) if !typed.is_deduced() => {
            out.push(b'{');
            let any = members(fields, true, object, excluded, out)?;
            out.push(b'}');
            Ok(any)
        }
        _ => Err(Unsupported),
    }
}

/// Appends the members of an object. These are sorted by name, like the members of the result. Returns
/// false if there are none.
fn members(
    fields: Fields,
    always: bool,
    object: &Map<String, Value>,
    excluded: ExcludedFields,
    out: &mut Vec<u8>,
) -> Result<bool, Unsupported> {
    let mut any = false;
    for (name, value) in object {
        let tree = excluded.trees.and_then(|set| set.field(name));
        if tree.is_some_and(|node| node.member) {
            continue;
        }
        let path = excluded.paths.and_then(|set| set.field(name));
        let below = ExcludedFields {
            paths: path.map(|node| &node.children).filter(|set| !set.is_empty()),
            trees: tree.map(|node| &node.children).filter(|set| !set.is_empty()),
        };
        let declared = fields.declared(name);
        let zero = declared.filter(|_| always).map_or(Zero::Nothing, zero);
        let begin = out.len();
        if any {
            out.push(b',');
        }
        write_key("f:", name, out);
        let is_excluded = path.is_some_and(|node| node.member);
        match node(fields.field_type(declared), zero, value, below, is_excluded, out)? {
            true => any = true,
            false => out.truncate(begin),
        }
    }
    Ok(any)
}

/// Appends `{…}` with the owned fields below a value, and the dot entry if the value's own path is
/// owned. Returns false if neither.
fn node(
    typed: Typed,
    zero: Zero,
    value: &Value,
    excluded: ExcludedFields,
    is_excluded: bool,
    out: &mut Vec<u8>,
) -> Result<bool, Unsupported> {
    const DOT: &[u8] = b"\".\":{},";
    // The dot entry precedes the others but is only present if there are others, so it is written first
    // and removed again if necessary.
    out.push(b'{');
    let begin = out.len();
    out.extend_from_slice(DOT);
    let (member, contents) = walk(typed, zero, value, excluded, out)?;
    let member = member && !is_excluded;
    match (member, contents) {
        (true, true) => {}
        (false, true) => drop(out.drain(begin..begin + DOT.len())),
        (_, false) => out.truncate(begin),
    }
    out.push(b'}');
    Ok(member || contents)
}

/// Returns whether the value's own path is owned and whether anything below it is. Appends the latter.
fn walk(
    typed: Typed,
    zero: Zero,
    value: &Value,
    excluded: ExcludedFields,
    out: &mut Vec<u8>,
) -> Result<(bool, bool), Unsupported> {
    if matches!(&zero, Zero::Plain(zero) if zero == value) {
        return Ok((false, false));
    }
    let new = matches!(zero, Zero::Nothing);
    if !new && typed.is_deduced() {
        return Err(Unsupported);
    }
    match (typed.atom(value), value) {
        (Atom::Opaque | Atom::Scalar(_) | Atom::List { kind: ListType::Atomic, .. }, _)
        | (Atom::Map(Fields { atomic: true, .. }), _) => match zero {
            // An empty value of an atomic type is compared as a whole.
            Zero::Struct => Err(Unsupported),
            _ => Ok((true, false)),
        },
        (Atom::Map(fields), Value::Object(object)) => {
            let is_struct = matches!(zero, Zero::Struct);
            // An empty object where there was nothing is a value of its own.
            let member = new || (object.is_empty() && !is_struct);
            Ok((member, members(fields, is_struct, object, excluded, out)?))
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            elements(item, kind, items, out)?;
            Ok((new || items.is_empty(), !items.is_empty()))
        }
        _ => Err(Unsupported),
    }
}

/// Appends the items of a list, sorted by key.
fn elements(item: Typed, kind: &ListType, items: &[Value], out: &mut Vec<u8>) -> Result<(), Unsupported> {
    let mut keys = Vec::with_capacity(items.len());
    for value in items {
        keys.push((key(&item.item_key(kind, value).map_err(|_| Unsupported)?), value));
    }
    keys.sort_by(|(a, _), (b, _)| a.cmp(b));
    if keys.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(Unsupported);
    }
    for (at, (key, value)) in keys.into_iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_key("", &key, out);
        node(item, Zero::Nothing, value, ExcludedFields { paths: None, trees: None }, false, out)?;
    }
    Ok(())
}

/// Appends a member name and the colon.
fn write_key(prefix: &str, name: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend_from_slice(prefix.as_bytes());
    schema::json::write_escaped(name, out);
    out.extend_from_slice(b"\":");
}

fn zero(field: &Field) -> Zero {
    match &field.shape {
        _ if field.tag == 0 => Zero::Nothing,
        _ if field.pointer && field.always_present => Zero::Plain(Value::Null),
        _ if field.pointer => Zero::Nothing,
        Shape::Struct(_) => Zero::Struct,
        _ if !field.always_present => Zero::Nothing,
        Shape::String => Zero::Plain(Value::from("")),
        Shape::Bool => Zero::Plain(Value::from(false)),
        Shape::Int32 | Shape::Int64 | Shape::Double => Zero::Plain(Value::from(0)),
        _ => Zero::Plain(Value::Null),
    }
}
