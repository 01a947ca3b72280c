//! Parses the generated schema table, `data/kubernetes.txt`. The head of the file describes its format.

use std::collections::HashMap;
use std::fmt;

use crate::table::{Field, Gvk, ListType, PatchStrategy, SchemaOr, Shape, Table, Type, TypeId};

/// The parsed file: the table, and data that only OpenAPI needs.
#[derive(Debug)]
pub(crate) struct SchemaData {
    pub table: Table,
    pub openapi: OpenApiExtensions,
}

/// Attributes that are published in OpenAPI but do not change how values are handled.
#[derive(Debug, Default)]
pub(crate) struct OpenApiExtensions {
    /// Declared list types. A list without one is atomic by default, which is not published.
    pub list_types: HashMap<(TypeId, Box<str>), Box<str>>,
    pub map_types: HashMap<(TypeId, Box<str>), Box<str>>,
    /// The values are separated by commas; a plus stands for a space.
    pub enums: HashMap<(TypeId, Box<str>), Box<str>>,
    pub patch_strategy: HashMap<(TypeId, Box<str>), Box<str>>,
    /// `x-kubernetes-unions` as JSON.
    pub union_types: HashMap<TypeId, Box<str>>,
}

/// A line that cannot be parsed. The data is compiled in and a test parses it, so this does not happen
/// at run time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidLine(pub usize);

impl fmt::Display for InvalidLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid line {} in the schema table", self.0)
    }
}

pub(crate) fn parse(text: &str) -> Result<SchemaData, InvalidLine> {
    let mut parser = SchemaParser { ids: type_ids(text), ..SchemaParser::default() };
    for (line, number) in text.lines().zip(1..) {
        parser.parse_line(line).ok_or(InvalidLine(number))?;
    }
    let mut table = Table::new(parser.types);
    table.set_details(parser.schema_or, parser.go_types);
    Ok(SchemaData { table, openapi: parser.openapi })
}

/// Assigns the type IDs before parsing, because types refer to types further down.
fn type_ids(text: &str) -> HashMap<String, TypeId> {
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
struct SchemaParser<'t> {
    ids: HashMap<String, TypeId>,
    package: &'t str,
    types: Vec<Type>,
    schema_or: HashMap<(TypeId, Box<str>), SchemaOr>,
    go_types: HashMap<(TypeId, Box<str>), Box<str>>,
    openapi: OpenApiExtensions,
}

impl<'t> SchemaParser<'t> {
    fn parse_line(&mut self, line: &'t str) -> Option<()> {
        if line.is_empty() || line.starts_with('#') {
            return Some(());
        }
        let (word, rest) = line.split_once(' ')?;
        match word {
            "package" => self.package = rest,
            "type" => self.parse_type(rest)?,
            "" => self.parse_field(rest)?,
            _ => return None,
        }
        Some(())
    }

    fn current_type(&self) -> TypeId {
        TypeId(u32::try_from(self.types.len()).unwrap_or(u32::MAX).wrapping_sub(1))
    }

    fn parse_type(&mut self, line: &str) -> Option<()> {
        let mut words = line.split(' ');
        let name = format!("{}.{}", self.package, words.next()?);
        self.types.push(Type { name: name.into(), ..Type::default() });
        let id = self.current_type();
        let ty = self.types.last_mut()?;
        for word in words {
            match word.split_once('=') {
                None if word == "atomic" => ty.atomic = true,
                Some(("union", union)) => {
                    self.openapi.union_types.insert(id, union.into());
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

    fn parse_field(&mut self, line: &str) -> Option<()> {
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
            always_present: false,
            default,
            patch_strategy: PatchStrategy::default(),
            merge_key: "".into(),
            name,
        };
        let (mut list, mut map) = (None, None);
        for word in words {
            match word.split_once('=') {
                None if word == "required" => field.required = true,
                None if word == "pointer" => field.pointer = true,
                None if word == "always" => field.always_present = true,
                Some(("list", value)) => list = Some(value),
                Some(("map", value)) => map = Some(value),
                Some(("enum", value)) => {
                    self.openapi.enums.insert((self.current_type(), field.name.clone()), value.into());
                }
                Some(("go", value)) => {
                    self.go_types.insert((self.current_type(), field.name.clone()), value.into());
                }
                Some(("key", value)) => field.merge_key = value.into(),
                Some(("strategy", value)) => {
                    self.openapi
                        .patch_strategy
                        .insert((self.current_type(), field.name.clone()), value.into());
                    for strategy in value.split(',') {
                        match strategy {
                            "merge" => field.patch_strategy.merge = true,
                            "retainKeys" => field.patch_strategy.retain_keys = true,
                            "replace" => {}
                            _ => return None,
                        }
                    }
                }
                _ => return None,
            }
        }
        let key = (self.current_type(), field.name.clone());
        if let Some(list) = list {
            self.openapi.list_types.insert(key.clone(), list.into());
        }
        if let Some(map) = map {
            self.openapi.map_types.insert(key.clone(), map.into());
        }
        if let Some(schema_or) = parse_schema_or(shape) {
            self.schema_or.insert(key, schema_or);
        }
        let kind = parse_list_type(list, &field)?;
        field.shape = self.parse_shape(shape, &kind, map == Some("atomic"))?;
        self.types.last_mut()?.fields.push(field);
        Some(())
    }

    /// `kind` and `atomic` apply to the outermost list or map.
    fn parse_shape(&self, text: &str, kind: &ListType, atomic: bool) -> Option<Shape> {
        if let Some(item) = text.strip_prefix("[]") {
            let item = Box::new(self.parse_shape(item, &ListType::Atomic, false)?);
            return Some(Shape::List { item, kind: kind.clone() });
        }
        if let Some(value) = text.strip_prefix("{}") {
            let value = Box::new(self.parse_shape(value, &ListType::Atomic, false)?);
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

/// A list without a declared type gets it from its patch strategy, as in upstream's server-side apply.
fn parse_list_type(text: Option<&str>, field: &Field) -> Option<ListType> {
    Some(match text {
        None if field.patch_strategy.merge && !field.merge_key.is_empty() => {
            ListType::Map(vec![field.merge_key.clone()])
        }
        None if field.patch_strategy.merge => ListType::Set,
        None | Some("atomic") => ListType::Atomic,
        Some("set") => ListType::Set,
        Some(text) => ListType::Map(text.strip_prefix("map:")?.split(',').map(Box::from).collect()),
    })
}

fn parse_schema_or(shape: &str) -> Option<SchemaOr> {
    Some(match shape.trim_start_matches("{}") {
        "schemaorarray" => SchemaOr::Array,
        "schemaorbool" => SchemaOr::Bool,
        "schemaorstrings" => SchemaOr::StringArray,
        _ => return None,
    })
}
