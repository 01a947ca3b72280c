//! Parses the `schemars` impls of `k8s-openapi` as text; they are regular enough for that.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::model::{Definition, Definitions, Field, scalar};

/// Reads every definition below a directory.
pub fn read(dir: &Path) -> Result<Definitions> {
    let mut definitions = Definitions::new();
    read_dir(dir, &mut definitions)?;
    Ok(definitions)
}

fn read_dir(dir: &Path, definitions: &mut Definitions) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            read_dir(&path, definitions)?;
        } else {
            let text = fs::read_to_string(&path)?;
            let file = read_file(&text).with_context(|| format!("cannot parse {}", path.display()))?;
            definitions.extend(file.into_iter().map(|definition| (definition.name.clone(), definition)));
        }
    }
    Ok(())
}

/// Parses the definition in a file and, for a listable kind, derives that of its list.
fn read_file(text: &str) -> Result<Vec<Definition>> {
    let Some(name) = between(text, "fn schema_name()", "\".into()").and_then(|text| text.split_once('"'))
    else {
        return Ok(Vec::new());
    };
    let (_, schema) = text.split_once("json_schema!(").context("no json_schema!")?;
    let schema = Parser { rest: schema }.value()?;
    let mut definition = Definition {
        name: name.1.to_owned(),
        description: schema["description"].as_str().unwrap_or_default().to_owned(),
        ..Definition::default()
    };
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
        definition.fields.push(Field {
            name: field.clone(),
            description: schema["description"].as_str().unwrap_or_default().to_owned(),
            shape: shape(schema).with_context(|| format!("field {field}"))?,
            // Upstream requires `metadata` in no kind; the crate requires it for convenience.
            required: field != "metadata" && required.iter().any(|name| name == field),
            ..Field::default()
        });
    }
    let constant = |name: &str| between(text, &format!("const {name}: &'static str = \""), "\";");
    let mut definitions = Vec::new();
    if let (Some(group), Some(version), Some(kind)) =
        (constant("GROUP"), constant("VERSION"), constant("KIND"))
    {
        definition.kinds.push(format!("{group}/{version}/{kind}"));
        if let Some(list) = constant("LIST_KIND") {
            definitions.push(list_of(&definition, &format!("{group}/{version}/{list}"), list));
        }
    }
    definitions.push(definition);
    Ok(definitions)
}

/// The definition of a list. `k8s-openapi` has one generic list, upstream has a type for each kind.
fn list_of(item: &Definition, gvk: &str, kind: &str) -> Definition {
    let field = |name: &str, shape: &str| Field {
        name: name.into(),
        shape: shape.into(),
        // `kind` and `apiVersion` of a list have the same description as those of its items.
        description: match item.fields.iter().find(|field| field.name == name && name != "metadata") {
            Some(field) => field.description.clone(),
            None => String::new(),
        },
        ..Field::default()
    };
    Definition {
        name: format!("{}.{kind}", super::model::package(&item.name)),
        kinds: vec![gvk.to_owned()],
        fields: vec![
            field("apiVersion", "string"),
            Field { required: true, ..field("items", &format!("[]{}", item.name)) },
            field("kind", "string"),
            field("metadata", "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta"),
        ],
        ..Definition::default()
    }
}

fn shape(schema: &Value) -> Result<String> {
    if let Some(path) = schema["$ref"].as_str() {
        let name = definition_name(path);
        return Ok(scalar(&name).map_or(name, str::to_owned));
    }
    let (kind, format) = (schema["type"].as_str(), schema["format"].as_str());
    Ok(match (kind, format) {
        (Some("string"), None) => "string".into(),
        (Some("string"), Some("byte")) => "bytes".into(),
        (Some("boolean"), None) => "bool".into(),
        (Some("integer"), Some(format @ ("int32" | "int64"))) => format.into(),
        (Some("number"), Some("double")) => "double".into(),
        (Some("array"), None) => format!("[]{}", shape(&schema["items"])?),
        (Some("object"), None) => format!("{{}}{}", shape(&schema["additionalProperties"])?),
        _ => bail!("unknown schema {schema}"),
    })
}

/// `crate::api::core::v1::Pod` is `io.k8s.api.core.v1.Pod`.
fn definition_name(path: &str) -> String {
    path.replace("crate::", "io.k8s.")
        .replace("::", ".")
        .replace("apiextensions_apiserver", "apiextensions-apiserver")
        .replace("kube_aggregator", "kube-aggregator")
}

fn between<'t>(text: &'t str, start: &str, end: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(inner, _)| inner)
}

/// Parses JSON that contains trailing commas, parentheses and calls of `subschema_for`.
struct Parser<'t> {
    rest: &'t str,
}

impl Parser<'_> {
    fn value(&mut self) -> Result<Value> {
        self.skip();
        if self.take("({") && self.peek("let mut schema_obj") {
            return self.described_reference();
        }
        if self.take("(") {
            let value = self.value()?;
            self.expect(")")?;
            return Ok(value);
        }
        match self.rest.chars().next().context("unexpected end")? {
            '{' => self.object(),
            '[' => self.array(),
            '"' => Ok(Value::String(self.string()?)),
            '_' => self.reference(),
            _ => {
                let end = self.rest.find([',', '\n', '}']).context("unexpected end")?;
                let (word, rest) = self.rest.split_at(end);
                self.rest = rest;
                serde_json::from_str(word.trim()).with_context(|| format!("unknown word {word}"))
            }
        }
    }

    fn object(&mut self) -> Result<Value> {
        self.expect("{")?;
        let mut object = Map::new();
        while !self.take("}") {
            let key = self.string()?;
            self.expect(":")?;
            object.insert(key, self.value()?);
            self.take(",");
        }
        Ok(Value::Object(object))
    }

    fn array(&mut self) -> Result<Value> {
        self.expect("[")?;
        let mut array = Vec::new();
        while !self.take("]") {
            array.push(self.value()?);
            self.take(",");
        }
        Ok(Value::Array(array))
    }

    fn reference(&mut self) -> Result<Value> {
        self.expect("__gen.subschema_for::<")?;
        let (path, rest) = self.rest.split_once(">()").context("unexpected end")?;
        self.rest = rest;
        Ok(Value::Object(Map::from_iter([("$ref".to_owned(), path.into())])))
    }

    fn described_reference(&mut self) -> Result<Value> {
        self.expect("let mut schema_obj =")?;
        self.skip();
        let mut value = self.reference()?;
        self.expect(";")?;
        self.expect("schema_obj.ensure_object().insert(\"description\".into(),")?;
        value["description"] = self.string()?.into();
        let (_, rest) = self.rest.split_once("})").context("unexpected end")?;
        self.rest = rest;
        Ok(value)
    }

    fn string(&mut self) -> Result<String> {
        self.expect("\"")?;
        let mut text = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Ok(text);
                }
                '\\' => match chars.next().context("unexpected end")?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    c @ ('"' | '\\' | '\'') => text.push(c),
                    c => bail!("unknown escape \\{c}"),
                },
                c => text.push(c),
            }
        }
        bail!("unexpected end of a string")
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn peek(&mut self, word: &str) -> bool {
        self.skip();
        self.rest.starts_with(word)
    }

    fn take(&mut self, word: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(word) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        if !self.take(word) {
            bail!("expected {word:?} at {:?}", self.rest.chars().take(40).collect::<String>());
        }
        Ok(())
    }
}
