//! The functions and their overloads. The table is in `signatures.txt`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use crate::types::Type;

/// An overload of a function.
#[derive(Debug)]
pub(crate) struct Overload {
    /// Identifies the overload for cost estimation. Empty if overloads do not differ in cost.
    pub id: &'static str,
    pub member: bool,
    /// The argument types, the receiver first.
    pub args: Vec<Type>,
    pub result: Type,
    /// Whether the overload has type parameters.
    pub generic: bool,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub name: &'static str,
    pub overloads: Vec<Overload>,
    /// The optional library of the function; empty for functions that are always available.
    pub library: &'static str,
}

pub(crate) fn function(name: &str) -> Option<&'static Function> {
    static TABLE: LazyLock<HashMap<&'static str, Function>> = LazyLock::new(table);
    TABLE.get(name.strip_prefix('.').unwrap_or(name))
}

fn table() -> HashMap<&'static str, Function> {
    let mut functions = HashMap::new();
    let mut library = "";
    for line in
        include_str!("signatures.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        if let Some(name) = line.strip_prefix('[') {
            library = name.trim_end_matches(']');
            continue;
        }
        let (names, overloads) = line.split_once(": ").expect("a line of the table has names and overloads");
        for name in names.split(' ') {
            let overloads = overloads.split("; ").map(overload).collect();
            functions.insert(name, Function { name, overloads, library });
        }
    }
    functions
}

fn overload(text: &'static str) -> Overload {
    let (signature, result) = text.rsplit_once(" -> ").expect("an overload has a result");
    let (id, signature) = match signature.split_once(' ') {
        Some((id, rest)) if !id.contains(['(', ',']) => (id, rest),
        _ => ("", signature),
    };
    let open = open_paren_index(signature);
    let (receiver, args) = (&signature[..open], &signature[open + 1..signature.len() - 1]);
    let receiver = receiver.strip_suffix('.');
    let args: Vec<Type> = receiver.into_iter().chain(split(args)).map(parse).collect();
    let generic = text.split(|c: char| !c.is_alphanumeric()).any(is_parameter);
    Overload { id, member: receiver.is_some(), args, result: parse(result), generic }
}

/// The index of the parenthesis that starts the argument list, which the last parenthesis closes.
fn open_paren_index(signature: &str) -> usize {
    let mut depth = 0;
    for (index, c) in signature.char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index;
        }
    }
    0
}

fn split(args: &'static str) -> Vec<&'static str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (index, c) in args.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(args[start..index].trim());
                start = index + 1;
            }
            _ => {}
        }
    }
    if !args.is_empty() {
        parts.push(args[start..].trim());
    }
    parts
}

fn is_parameter(word: &str) -> bool {
    word.len() == 1 && word.chars().all(|c| c.is_ascii_uppercase())
}

fn parse(text: &'static str) -> Type {
    let (name, args) = match text.split_once('(') {
        Some((name, args)) => (name, split(args.strip_suffix(')').unwrap_or(args))),
        None => (text, Vec::new()),
    };
    let mut args = args.into_iter().map(parse);
    let mut next = || args.next().unwrap_or(Type::Dyn);
    match name {
        "bool" => Type::Bool,
        "int" => Type::Int,
        "uint" => Type::Uint,
        "double" => Type::Double,
        "string" => Type::String,
        "bytes" => Type::Bytes,
        "duration" => Type::Duration,
        "timestamp" => Type::Timestamp,
        "dyn" => Type::Dyn,
        "list" => Type::list(next()),
        "map" => Type::map(next(), next()),
        "optional" => Type::optional(next()),
        "type" => Type::Type(Some(Arc::new(next()))),
        name if is_parameter(name) => Type::Param(name.into()),
        name => Type::opaque(name),
    }
}
