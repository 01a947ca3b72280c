//! Reads the generated table, `data/kubernetes.txt`; the format is described at its head.

use std::collections::HashMap;
use std::fmt;

use crate::table::{Alternative, Field, Gvk, ListKind, Shape, Strategy, Table, Type, TypeId};

/// The table and what only OpenAPI wants to know.
#[derive(Debug)]
pub(crate) struct Read {
    pub table: Table,
    pub published: Published,
}

/// Words of the file that change nothing about how values are handled.
#[derive(Debug, Default)]
pub(crate) struct Published {
    /// Lists that say their list type; the others are atomic without saying so.
    pub list_types: HashMap<(TypeId, Box<str>), Box<str>>,
    pub map_types: HashMap<(TypeId, Box<str>), Box<str>>,
    /// Separated by commas, with a plus for a space.
    pub enums: HashMap<(TypeId, Box<str>), Box<str>>,
    pub strategies: HashMap<(TypeId, Box<str>), Box<str>>,
    /// `x-kubernetes-unions`, as JSON.
    pub unions: HashMap<TypeId, Box<str>>,
}

/// A line that makes no sense. The data is compiled in and checked by a test, so nobody meets it at run time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadLine(pub usize);

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the schema table makes no sense", self.0)
    }
}

pub(crate) fn read(text: &str) -> Result<Read, BadLine> {
    let mut reader = Reader { ids: ids(text), ..Reader::default() };
    for (line, number) in text.lines().zip(1..) {
        reader.line(line).ok_or(BadLine(number))?;
    }
    let mut table = Table::new(reader.types);
    table.set_details(reader.alternatives, reader.go_types);
    Ok(Read { table, published: reader.published })
}

/// Types refer to types further down, so their numbers are given out first.
fn ids(text: &str) -> HashMap<String, TypeId> {
    let mut ids = HashMap::new();
    let mut package = "";
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("package ") {
            package = name;
        } else if let Some(words) = line.strip_prefix("type ") {
            let name = words.split(' ').next().unwrap_or_default();
            let id = TypeId(u32::try_from(ids.len()).unwrap_or(u32::MAX));
            ids.insert(format!("{package}.{name}"), id);
        }
    }
    ids
}

#[derive(Default)]
struct Reader<'t> {
    ids: HashMap<String, TypeId>,
    package: &'t str,
    types: Vec<Type>,
    alternatives: HashMap<(TypeId, Box<str>), Alternative>,
    go_types: HashMap<(TypeId, Box<str>), Box<str>>,
    published: Published,
}

impl<'t> Reader<'t> {
    fn line(&mut self, line: &'t str) -> Option<()> {
        if line.is_empty() || line.starts_with('#') {
            return Some(());
        }
        let (word, rest) = line.split_once(' ')?;
        match word {
            "package" => self.package = rest,
            "type" => self.start(rest)?,
            "" => self.field(rest)?,
            _ => return None,
        }
        Some(())
    }

    fn current(&self) -> TypeId {
        TypeId(u32::try_from(self.types.len()).unwrap_or(u32::MAX).wrapping_sub(1))
    }

    fn start(&mut self, line: &str) -> Option<()> {
        let mut words = line.split(' ');
        let name = format!("{}.{}", self.package, words.next()?);
        self.types.push(Type { name: name.into(), ..Type::default() });
        let id = self.current();
        let ty = self.types.last_mut()?;
        for word in words {
            match word.split_once('=') {
                None if word == "atomic" => ty.atomic = true,
                Some(("union", union)) => {
                    self.published.unions.insert(id, union.into());
                }
                Some(("kind", kind)) => {
                    let mut parts = kind.split('/').map(Box::from);
                    ty.kinds.push(Gvk { group: parts.next()?, version: parts.next()?, kind: parts.next()? });
                }
                _ => return None,
            }
        }
        Some(())
    }

    fn field(&mut self, line: &str) -> Option<()> {
        let (line, default) = match line.split_once(" default=") {
            Some((line, default)) => (line, Some(serde_json::from_str(default).ok()?)),
            None => (line, None),
        };
        let mut words = line.split(' ');
        let name: Box<str> = words.next()?.into();
        let tag = words
            .next()?
            .split('.')
            .try_fold(0, |tag, part| Some(tag << 8 | u32::from(part.parse::<u8>().ok()?)))?;
        let shape = words.next()?;
        let mut field = Field {
            shape: Shape::Json,
            tag,
            required: false,
            pointer: false,
            always: false,
            default,
            strategy: Strategy::default(),
            merge_key: "".into(),
            name,
        };
        let (mut list, mut map) = (None, None);
        for word in words {
            match word.split_once('=') {
                None if word == "required" => field.required = true,
                None if word == "pointer" => field.pointer = true,
                None if word == "always" => field.always = true,
                Some(("list", value)) => list = Some(value),
                Some(("map", value)) => map = Some(value),
                Some(("enum", value)) => {
                    self.published.enums.insert((self.current(), field.name.clone()), value.into());
                }
                Some(("go", value)) => {
                    self.go_types.insert((self.current(), field.name.clone()), value.into());
                }
                Some(("key", value)) => field.merge_key = value.into(),
                Some(("strategy", value)) => {
                    self.published.strategies.insert((self.current(), field.name.clone()), value.into());
                    for strategy in value.split(',') {
                        match strategy {
                            "merge" => field.strategy.merge = true,
                            "retainKeys" => field.strategy.retain_keys = true,
                            "replace" => {}
                            _ => return None,
                        }
                    }
                }
                _ => return None,
            }
        }
        let key = (self.current(), field.name.clone());
        if let Some(list) = list {
            self.published.list_types.insert(key.clone(), list.into());
        }
        if let Some(map) = map {
            self.published.map_types.insert(key.clone(), map.into());
        }
        if let Some(alternative) = alternative(shape) {
            self.alternatives.insert(key, alternative);
        }
        let kind = list_kind(list, &field)?;
        field.shape = self.shape(shape, &kind, map == Some("atomic"))?;
        self.types.last_mut()?.fields.push(field);
        Some(())
    }

    /// `kind` and `atomic` are those of the outermost list or map.
    fn shape(&self, text: &str, kind: &ListKind, atomic: bool) -> Option<Shape> {
        if let Some(item) = text.strip_prefix("[]") {
            let item = Box::new(self.shape(item, &ListKind::Atomic, false)?);
            return Some(Shape::List { item, kind: kind.clone() });
        }
        if let Some(value) = text.strip_prefix("{}") {
            let value = Box::new(self.shape(value, &ListKind::Atomic, false)?);
            return Some(Shape::Map { value, atomic });
        }
        Some(match text {
            "string" => Shape::String,
            "bool" => Shape::Bool,
            "int32" => Shape::Int32,
            "int64" => Shape::Int64,
            "double" => Shape::Double,
            "bytes" => Shape::Bytes,
            "time" => Shape::Time,
            "microtime" => Shape::MicroTime,
            "duration" => Shape::Duration,
            "quantity" => Shape::Quantity,
            "intorstring" => Shape::IntOrString,
            "raw" => Shape::RawExtension,
            "fields" => Shape::FieldsV1,
            "json" | "schemaorarray" | "schemaorbool" | "schemaorstrings" => Shape::Json,
            name if name.contains('.') => Shape::Struct(*self.ids.get(name)?),
            name => Shape::Struct(*self.ids.get(&format!("{}.{name}", self.package))?),
        })
    }
}

/// A list that does not say its type is told apart by its patch strategy, as upstream's apply does.
fn list_kind(text: Option<&str>, field: &Field) -> Option<ListKind> {
    Some(match text {
        None if field.strategy.merge && !field.merge_key.is_empty() => {
            ListKind::Map(vec![field.merge_key.clone()])
        }
        None if field.strategy.merge => ListKind::Set,
        None | Some("atomic") => ListKind::Atomic,
        Some("set") => ListKind::Set,
        Some(text) => ListKind::Map(text.strip_prefix("map:")?.split(',').map(Box::from).collect()),
    })
}

fn alternative(shape: &str) -> Option<Alternative> {
    Some(match shape.trim_start_matches("{}") {
        "schemaorarray" => Alternative::Array,
        "schemaorbool" => Alternative::Bool,
        "schemaorstrings" => Alternative::Strings,
        _ => return None,
    })
}
