//! JSONPath, as far as printer columns and selectable fields of CRDs use it. Upstream:
//! `client-go/util/jsonpath`.

use serde_json::Value;

/// A parsed JSONPath.
#[derive(Debug, PartialEq)]
pub struct JsonPath(Vec<PathNode>);

#[derive(Debug, PartialEq)]
enum PathNode {
    Field(String),
    Index(i64),
    /// `[from:to:step]`
    Slice(Option<i64>, Option<i64>, i64),
    Wildcard,
    /// `..name`: recursive descent.
    Recursive,
    /// `['a','b']` and `[0,1]`
    Union(Vec<PathNode>),
    Filter(PathFilter),
}

#[derive(Debug, PartialEq)]
struct PathFilter {
    left: Operand,
    /// The operator and the right operand. `None` tests whether the left operand exists.
    right: Option<(String, Operand)>,
}

#[derive(Debug, PartialEq)]
enum Operand {
    Literal(Value),
    Path(JsonPath),
}

impl JsonPath {
    /// Parses a path such as `.spec.ports[0].name`, optionally in braces.
    pub fn parse(text: &str) -> Option<JsonPath> {
        let text = text.trim();
        let text = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or(text);
        let text = text.strip_prefix(['$', '@']).unwrap_or(text);
        let mut steps = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            rest = parse_node(rest, &mut steps)?;
        }
        Some(JsonPath(steps))
    }

    /// The matching values in order. Missing fields match nothing.
    pub fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        let mut found = vec![value];
        for step in &self.0 {
            found = found.into_iter().flat_map(|value| step.evaluate(value)).collect();
        }
        found
    }
}

/// Parses one node and returns the rest of the text.
fn parse_node<'t>(text: &'t str, steps: &mut Vec<PathNode>) -> Option<&'t str> {
    if let Some(rest) = text.strip_prefix("..") {
        steps.push(PathNode::Recursive);
        // A name may follow without another dot.
        return if rest.starts_with('[') { Some(rest) } else { parse_name(rest, steps) };
    }
    if let Some(rest) = text.strip_prefix('.') {
        return if rest.is_empty() || rest.starts_with('[') { Some(rest) } else { parse_name(rest, steps) };
    }
    if let Some(rest) = text.strip_prefix('[') {
        let end = find_closing_bracket(rest)?;
        steps.push(parse_bracket(rest[..end].trim())?);
        return Some(&rest[end + 1..]);
    }
    parse_name(text, steps)
}

fn parse_name<'t>(text: &'t str, steps: &mut Vec<PathNode>) -> Option<&'t str> {
    let mut field = String::new();
    let mut chars = text.char_indices();
    let mut end = text.len();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => field.push(chars.next()?.1),
            '.' | '[' => {
                end = at;
                break;
            }
            c => field.push(c),
        }
    }
    if field.is_empty() {
        return None;
    }
    steps.push(if field == "*" { PathNode::Wildcard } else { PathNode::Field(field) });
    Some(&text[end..])
}

/// The position of the closing bracket, ignoring quoted text and nested brackets.
fn find_closing_bracket(text: &str) -> Option<usize> {
    let (mut quote, mut depth) = (None, 0);
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match (quote, c) {
            (Some(_), '\\') => drop(chars.next()),
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') if depth == 0 => return Some(at),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn parse_bracket(text: &str) -> Option<PathNode> {
    if let Some(condition) = text.strip_prefix("?(").and_then(|text| text.strip_suffix(')')) {
        return Some(PathNode::Filter(parse_filter(condition.trim())?));
    }
    if text == "*" {
        return Some(PathNode::Wildcard);
    }
    if text.contains(',') {
        let parts: Option<Vec<PathNode>> = text.split(',').map(|part| parse_bracket(part.trim())).collect();
        return parts.map(PathNode::Union);
    }
    if let Some(name) = parse_quoted(text) {
        return Some(PathNode::Field(name));
    }
    if text.contains(':') {
        let mut parts = text.split(':').map(|part| match part.trim() {
            "" => Some(None),
            number => number.parse().ok().map(Some),
        });
        let (from, to) = (parts.next()??, parts.next()??);
        let step = parts.next().unwrap_or(Some(None))?.unwrap_or(1);
        return (parts.next().is_none() && step > 0).then_some(PathNode::Slice(from, to, step));
    }
    text.parse().ok().map(PathNode::Index)
}

fn parse_quoted(text: &str) -> Option<String> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let inside = text.strip_prefix(quote)?.strip_suffix(quote)?;
    Some(inside.replace(&format!("\\{quote}"), &quote.to_string()).replace("\\\\", "\\"))
}

fn parse_filter(text: &str) -> Option<PathFilter> {
    const OPERATORS: [&str; 6] = ["==", "!=", "<=", ">=", "<", ">"];
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, _) => {
                if let Some(operator) = OPERATORS.iter().find(|operator| text[at..].starts_with(**operator)) {
                    let (left, right) = (text[..at].trim(), text[at + operator.len()..].trim());
                    let right = Some(((*operator).to_owned(), parse_operand(right)?));
                    return Some(PathFilter { left: parse_operand(left)?, right });
                }
            }
        }
    }
    Some(PathFilter { left: parse_operand(text)?, right: None })
}

fn parse_operand(text: &str) -> Option<Operand> {
    if let Some(text) = parse_quoted(text) {
        return Some(Operand::Literal(text.into()));
    }
    if text.starts_with(['@', '$', '.']) {
        return JsonPath::parse(text).map(Operand::Path);
    }
    serde_json::from_str(text).ok().filter(|value: &Value| !value.is_object()).map(Operand::Literal)
}

impl PathNode {
    fn evaluate<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        match (self, value) {
            (PathNode::Field(name), Value::Object(map)) => map.get(name).into_iter().collect(),
            (PathNode::Index(at), Value::Array(items)) => {
                let at = if *at < 0 { at + items.len() as i64 } else { *at };
                usize::try_from(at).ok().and_then(|at| items.get(at)).into_iter().collect()
            }
            (PathNode::Slice(from, to, step), Value::Array(items)) => {
                let length = items.len() as i64;
                let clamp_index = |at: i64| (if at < 0 { at + length } else { at }).clamp(0, length) as usize;
                let (from, to) = (clamp_index(from.unwrap_or(0)), clamp_index(to.unwrap_or(length)));
                let range = items.get(from..to).unwrap_or_default();
                range.iter().step_by(usize::try_from(*step).unwrap_or(1)).collect()
            }
            (PathNode::Wildcard, Value::Array(items)) => items.iter().collect(),
            (PathNode::Wildcard, Value::Object(map)) => map.values().collect(),
            (PathNode::Union(steps), value) => steps.iter().flat_map(|step| step.evaluate(value)).collect(),
            (PathNode::Recursive, value) => {
                let mut found = Vec::new();
                collect_recursive(value, &mut found);
                found
            }
            (PathNode::Filter(filter), Value::Array(items)) => {
                items.iter().filter(|item| filter.matches(item)).collect()
            }
            (PathNode::Filter(filter), Value::Object(map)) => {
                map.values().filter(|item| filter.matches(item)).collect()
            }
            _ => Vec::new(),
        }
    }
}

fn collect_recursive<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    found.push(value);
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect_recursive(item, found)),
        Value::Object(map) => map.values().for_each(|item| collect_recursive(item, found)),
        _ => {}
    }
}

impl PathFilter {
    fn matches(&self, item: &Value) -> bool {
        let Some(left) = self.left.evaluate(item) else { return false };
        let Some((operator, right)) = &self.right else { return true };
        let Some(right) = right.evaluate(item) else { return false };
        let order = match (left, right) {
            (Value::Number(a), Value::Number(b)) => a.as_f64().partial_cmp(&b.as_f64()),
            (Value::String(a), Value::String(b)) => Some(a.cmp(b)),
            (a, b) => (a == b).then_some(std::cmp::Ordering::Equal),
        };
        match operator.as_str() {
            "==" => order.is_some_and(|order| order.is_eq()),
            "!=" => order.is_none_or(|order| order.is_ne()),
            "<=" => order.is_some_and(|order| order.is_le()),
            ">=" => order.is_some_and(|order| order.is_ge()),
            "<" => order.is_some_and(|order| order.is_lt()),
            _ => order.is_some_and(|order| order.is_gt()),
        }
    }
}

impl Operand {
    fn evaluate<'v>(&'v self, item: &'v Value) -> Option<&'v Value> {
        match self {
            Operand::Literal(value) => Some(value),
            Operand::Path(path) => path.find(item).first().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(path: &str, expected: &str) {
        let object = json!({
            "spec": {"size": 3, "a.b": "dotted", "list": [1, 2, 3, 4]},
            "status": {"conditions": [
                {"type": "Ready", "status": "True", "n": 1}, {"type": "Synced", "status": "False", "n": 5},
            ]},
        });
        let found = match JsonPath::parse(path) {
            Some(path) => path.find(&object).iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            None => "bad".to_owned(),
        };
        assert_eq!(found, expected, "{path}");
    }

    #[test]
    fn find_returns_matching_values() {
        check(".spec.size", "3");
        check("{.spec.size}", "3");
        check(".spec.nothing.at.all", "");
        check(r".spec.a\.b", "\"dotted\"");
        check(".spec['a.b']", "\"dotted\"");
        check(".spec.list[0]", "1");
        check(".spec.list[-1]", "4");
        check(".spec.list[1:3]", "2 3");
        check(".spec.list[::2]", "1 3");
        check(".spec.list[0,3]", "1 4");
        check(".spec.list[*]", "1 2 3 4");
        check(r#".status.conditions[?(@.type=="Ready")].status"#, "\"True\"");
        check(".status.conditions[?(@.type == 'Synced')].status", "\"False\"");
        check(".status.conditions[?(@.n > 1)].type", "\"Synced\"");
        check(".status.conditions[?(@.nope)].type", "");
        check(".status.conditions[?(@.n)].n", "1 5");
        check(
            "..status",
            r#"{"conditions":[{"n":1,"status":"True","type":"Ready"},{"n":5,"status":"False","type":"Synced"}]} "True" "False""#,
        );
        check(".spec[", "bad");
        check(".spec.list[x]", "bad");
        check(".spec..", "bad");
        check(".a[?(@.b == )]", "bad");
    }
}
