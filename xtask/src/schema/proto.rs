//! Parses the messages of `k8s-pb`: tags, field order and the markers in comments.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::{fs, mem};

use anyhow::{Context, Result};

use super::model::{Definition, Definitions, Field};

/// The messages of one package.
#[derive(Debug, Default)]
pub struct Package {
    name: String,
    messages: BTreeMap<String, Rc<Message>>,
}

#[derive(Debug, Default)]
struct Message {
    comments: Vec<String>,
    fields: Vec<MessageField>,
}

#[derive(Debug)]
struct MessageField {
    name: String,
    /// The last part of the message's name, for fields of a message type.
    message: Option<String>,
    tag: u32,
    comments: Vec<String>,
}

/// Reads every package below a directory.
pub fn read(dir: &Path) -> Result<Vec<Package>> {
    let mut packages = Vec::new();
    read_dir(dir, "io.k8s", &mut packages)?;
    Ok(packages)
}

fn read_dir(dir: &Path, name: &str, packages: &mut Vec<Package>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        let part = path.file_name().and_then(|name| name.to_str()).context("a file name is not UTF-8")?;
        if path.is_dir() {
            read_dir(&path, &format!("{name}.{}", part.replace('_', "-")), packages)?;
        } else if part == "mod.rs" {
            packages.push(Package { name: name.to_owned(), messages: messages(&fs::read_to_string(&path)?) });
        }
    }
    Ok(())
}

fn messages(text: &str) -> BTreeMap<String, Rc<Message>> {
    let mut messages = BTreeMap::new();
    let mut comments = Vec::new();
    let mut open: Option<(String, Message)> = None;
    let mut tag = 0;
    for line in text.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("///") {
            comments.push(comment.trim().to_owned());
        } else if let Some(attribute) = line.strip_prefix("#[prost(") {
            tag = attribute
                .split_once("tag = \"")
                .and_then(|(_, rest)| rest.split_once('"')?.0.parse().ok())
                .unwrap_or_default();
        } else if let Some(name) = line.strip_prefix("pub struct ") {
            let name = name.trim_end_matches(['{', '}', ' ']);
            open = Some((
                normalize_name(name),
                Message { comments: mem::take(&mut comments), fields: Vec::new() },
            ));
        } else if line == "}" {
            messages.extend(open.take().map(|(name, message)| (name, Rc::new(message))));
        } else if let (Some((_, message)), Some((name, kind))) = (&mut open, field(line)) {
            let comments = mem::take(&mut comments);
            message.fields.push(MessageField { name: normalize_name(name), message: kind, tag, comments });
        }
    }
    messages
}

/// The name and message type of a field's line.
fn field(line: &str) -> Option<(&str, Option<String>)> {
    let (name, kind) = line.strip_prefix("pub ")?.trim_end_matches(',').split_once(':')?;
    let kind = kind.trim_end_matches('>').rsplit([':', '<', ' ']).next()?;
    let message = kind.starts_with(|c: char| c.is_ascii_uppercase()) && kind != "String";
    Some((name.trim_start_matches("r#"), message.then(|| normalize_name(kind))))
}

/// Removes everything but letters and digits, because prost renames items to Rust's conventions.
fn normalize_name(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

impl Package {
    /// Adds tags, order and markers of the messages to the definitions with the same names.
    pub fn apply(&self, definitions: &mut Definitions) {
        let package = &self.name;
        for definition in definitions.values_mut().filter(|d| super::model::package(&d.name) == package) {
            if let Some(message) = self.messages.get(&normalize_name(definition.short_name())) {
                definition.atomic = value(&message.comments, "structType") == Some("atomic");
                let mut ordered = Vec::new();
                self.flatten(message, &mut Vec::new(), definition, &mut ordered);
                ordered.append(&mut definition.fields);
                definition.fields = ordered;
            }
        }
    }

    /// Fills in missing descriptions: those of lists and of types from the overlay.
    pub fn describe(&self, definitions: &mut Definitions) {
        let package = &self.name;
        for definition in definitions.values_mut().filter(|d| super::model::package(&d.name) == package) {
            let Some(message) = self.messages.get(&normalize_name(definition.short_name())) else { continue };
            if definition.description.is_empty() {
                definition.description = description_text(&message.comments);
            }
            for field in definition.fields.iter_mut().filter(|field| field.description.is_empty()) {
                if let Some(message_field) = message
                    .fields
                    .iter()
                    .find(|message_field| normalize_name(&field.name) == message_field.name)
                {
                    field.description = description_text(&message_field.comments);
                }
            }
        }
    }

    /// Moves the fields of a message from the definition to `ordered`. A message field without a JSON
    /// field is an embedded struct, whose fields are inlined in JSON.
    fn flatten(
        &self,
        message: &Message,
        path: &mut Vec<u32>,
        definition: &mut Definition,
        ordered: &mut Vec<Field>,
    ) {
        for message_field in &message.fields {
            path.push(message_field.tag);
            if let Some(at) =
                definition.fields.iter().position(|field| normalize_name(&field.name) == message_field.name)
            {
                let mut field = definition.fields.remove(at);
                field.tag.clone_from(path);
                message_field.apply_markers(&mut field);
                ordered.push(field);
            } else if let Some(embedded) = self.embedded(message_field) {
                self.flatten(embedded, path, definition, ordered);
            }
            path.pop();
        }
    }

    /// An embedded struct is named after its type.
    fn embedded(&self, field: &MessageField) -> Option<&Rc<Message>> {
        let message = field.message.as_ref().filter(|message| message.ends_with(&field.name))?;
        self.messages.get(message)
    }
}

impl MessageField {
    fn apply_markers(&self, field: &mut Field) {
        let marker = |name| value(&self.comments, name).unwrap_or_default().to_owned();
        field.list = marker("listType");
        if field.list == "map" {
            field.list =
                format!("map:{}", values(&self.comments, "listMapKey").collect::<Vec<_>>().join(","));
        }
        field.map = marker("mapType");
        if field.map.is_empty() {
            field.map = marker("structType");
        }
        field.strategy = marker("patchStrategy");
        field.key = marker("patchMergeKey");
        field.default = marker("default");
    }
}

fn values<'c>(comments: &'c [String], marker: &str) -> impl Iterator<Item = &'c str> {
    comments.iter().filter_map(move |line| line.strip_prefix('+')?.strip_prefix(marker)?.strip_prefix('='))
}

fn value<'c>(comments: &'c [String], marker: &str) -> Option<&'c str> {
    values(comments, marker).next()
}

/// The comment as in OpenAPI: without markers, with the lines of a paragraph joined.
fn description_text(comments: &[String]) -> String {
    let mut text = String::new();
    for line in comments.iter().filter(|line| !line.starts_with('+')) {
        let line = line.replace("<http", "http").replace('>', "");
        match line.is_empty() {
            true => text.push_str("\n\n"),
            false if text.is_empty() || text.ends_with('\n') => text.push_str(&line),
            false => {
                text.push(' ');
                text.push_str(&line);
            }
        }
    }
    text.trim_end().to_owned()
}
