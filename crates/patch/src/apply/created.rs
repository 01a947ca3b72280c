//! Whoever creates an object owns everything in it: the record of that, written down in one walk.
//!
//! It is what comparing the object with an empty one and printing the difference gives, for objects without anything
//! unusual; creates are too frequent to build three sets of paths for each.

use schema::{Field, ListKind, Shape};
use serde_json::{Map, Value};

use super::fieldset::Set;
use super::fieldsv1::key;
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

/// Appends the JSON form of all fields a new object sets; false if there are none.
pub(crate) fn fields(
    typed: Typed,
    object: &Value,
    left_out: LeftOut,
    out: &mut Vec<u8>,
) -> Result<bool, Unusual> {
    match (typed.atom(object), object) {
        (Atom::Map(fields @ Fields { atomic: false, .. }), Value::Object(object)) if !typed.is_free() => {
            out.push(b'{');
            let any = members(fields, true, object, left_out, out)?;
            out.push(b'}');
            Ok(any)
        }
        _ => Err(Unusual),
    }
}

/// Appends the members of an object, which are sorted by name as those of the record are; false if there are none.
fn members(
    fields: Fields,
    always: bool,
    object: &Map<String, Value>,
    left_out: LeftOut,
    out: &mut Vec<u8>,
) -> Result<bool, Unusual> {
    let mut any = false;
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
        let declared = fields.declared(name);
        let zero = declared.filter(|_| always).map_or(Zero::Nothing, zero);
        let begin = out.len();
        if any {
            out.push(b',');
        }
        write_key("f:", name, out);
        let stripped = path.is_some_and(|node| node.member);
        match node(fields.described(declared), zero, value, below, stripped, out)? {
            true => any = true,
            false => out.truncate(begin),
        }
    }
    Ok(any)
}

/// Appends `{…}` with what below a value belongs to its creator, and a dot if the path to it does; false if neither.
fn node(
    typed: Typed,
    zero: Zero,
    value: &Value,
    left_out: LeftOut,
    stripped: bool,
    out: &mut Vec<u8>,
) -> Result<bool, Unusual> {
    const DOT: &[u8] = b"\".\":{},";
    // The dot comes first, but is only there where something follows.
    out.push(b'{');
    let begin = out.len();
    out.extend_from_slice(DOT);
    let (member, contents) = walk(typed, zero, value, left_out, out)?;
    let member = member && !stripped;
    match (member, contents) {
        (true, true) => {}
        (false, true) => drop(out.drain(begin..begin + DOT.len())),
        (_, false) => out.truncate(begin),
    }
    out.push(b'}');
    Ok(member || contents)
}

/// Whether the path to a value belongs to its creator, and whether anything below it does, which is appended.
fn walk(
    typed: Typed,
    zero: Zero,
    value: &Value,
    left_out: LeftOut,
    out: &mut Vec<u8>,
) -> Result<(bool, bool), Unusual> {
    if matches!(&zero, Zero::Plain(zero) if zero == value) {
        return Ok((false, false));
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
            _ => Ok((true, false)),
        },
        (Atom::Map(fields), Value::Object(object)) => {
            let is_struct = matches!(zero, Zero::Struct);
            // An empty object in the place of nothing is a value of its own.
            let member = new || (object.is_empty() && !is_struct);
            Ok((member, members(fields, is_struct, object, left_out, out)?))
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            elements(item, kind, items, out)?;
            Ok((new || items.is_empty(), !items.is_empty()))
        }
        _ => Err(Unusual),
    }
}

/// Appends the elements of a list, sorted by their keys.
fn elements(item: Typed, kind: &ListKind, items: &[Value], out: &mut Vec<u8>) -> Result<(), Unusual> {
    let mut keys = Vec::with_capacity(items.len());
    for value in items {
        keys.push((key(&item.item_key(kind, value).map_err(|_| Unusual)?), value));
    }
    keys.sort_by(|(a, _), (b, _)| a.cmp(b));
    if keys.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(Unusual);
    }
    for (at, (key, value)) in keys.into_iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_key("", &key, out);
        node(item, Zero::Nothing, value, LeftOut { paths: None, trees: None }, false, out)?;
    }
    Ok(())
}

/// Appends a member's name and the colon.
fn write_key(prefix: &str, name: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend_from_slice(prefix.as_bytes());
    schema::json::write_inside(name, out);
    out.extend_from_slice(b"\":");
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
