//! JSONPath as far as definitions use it: for the columns of tables and the fields of selectors.

use serde_json::Value;

/// Steps from an object to values in it.
#[derive(Debug, PartialEq)]
pub struct JsonPath(Vec<Step>);

#[derive(Debug, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    /// `[from:to:step]`
    Slice(Option<i64>, Option<i64>, i64),
    All,
    /// `..name`: wherever it is.
    Descend,
    /// `['a','b']` and `[0,1]`
    Union(Vec<Step>),
    Filter(Filter),
}

#[derive(Debug, PartialEq)]
struct Filter {
    left: Operand,
    /// The operator and what is compared with; `None` asks whether the left is there.
    right: Option<(String, Operand)>,
}

#[derive(Debug, PartialEq)]
enum Operand {
    Literal(Value),
    Path(JsonPath),
}

impl JsonPath {
    /// Reads `.spec.ports[0].name`, also within braces.
    pub fn parse(text: &str) -> Option<JsonPath> {
        let text = text.trim();
        let text = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or(text);
        let text = text.strip_prefix(['$', '@']).unwrap_or(text);
        let mut steps = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            rest = step(rest, &mut steps)?;
        }
        Some(JsonPath(steps))
    }

    /// The values found, in order. What is not there is not found.
    pub fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        let mut found = vec![value];
        for step in &self.0 {
            found = found.into_iter().flat_map(|value| step.of(value)).collect();
        }
        found
    }
}

/// Reads one step and gives back what comes after it.
fn step<'t>(text: &'t str, steps: &mut Vec<Step>) -> Option<&'t str> {
    if let Some(rest) = text.strip_prefix("..") {
        steps.push(Step::Descend);
        // What is to be found may follow without another dot.
        return if rest.starts_with('[') { Some(rest) } else { name(rest, steps) };
    }
    if let Some(rest) = text.strip_prefix('.') {
        return if rest.is_empty() || rest.starts_with('[') { Some(rest) } else { name(rest, steps) };
    }
    if let Some(rest) = text.strip_prefix('[') {
        let end = closing(rest)?;
        steps.push(bracket(rest[..end].trim())?);
        return Some(&rest[end + 1..]);
    }
    name(text, steps)
}

fn name<'t>(text: &'t str, steps: &mut Vec<Step>) -> Option<&'t str> {
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
    steps.push(if field == "*" { Step::All } else { Step::Field(field) });
    Some(&text[end..])
}

/// Where the bracket that is open closes, quotes and inner brackets aside.
fn closing(text: &str) -> Option<usize> {
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

fn bracket(text: &str) -> Option<Step> {
    if let Some(condition) = text.strip_prefix("?(").and_then(|text| text.strip_suffix(')')) {
        return Some(Step::Filter(filter(condition.trim())?));
    }
    if text == "*" {
        return Some(Step::All);
    }
    if text.contains(',') {
        let parts: Option<Vec<Step>> = text.split(',').map(|part| bracket(part.trim())).collect();
        return parts.map(Step::Union);
    }
    if let Some(name) = quoted(text) {
        return Some(Step::Field(name));
    }
    if text.contains(':') {
        let mut parts = text.split(':').map(|part| match part.trim() {
            "" => Some(None),
            number => number.parse().ok().map(Some),
        });
        let (from, to) = (parts.next()??, parts.next()??);
        let step = parts.next().unwrap_or(Some(None))?.unwrap_or(1);
        return (parts.next().is_none() && step > 0).then_some(Step::Slice(from, to, step));
    }
    text.parse().ok().map(Step::Index)
}

fn quoted(text: &str) -> Option<String> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let inside = text.strip_prefix(quote)?.strip_suffix(quote)?;
    Some(inside.replace(&format!("\\{quote}"), &quote.to_string()).replace("\\\\", "\\"))
}

fn filter(text: &str) -> Option<Filter> {
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
                    let right = Some(((*operator).to_owned(), operand(right)?));
                    return Some(Filter { left: operand(left)?, right });
                }
            }
        }
    }
    Some(Filter { left: operand(text)?, right: None })
}

fn operand(text: &str) -> Option<Operand> {
    if let Some(text) = quoted(text) {
        return Some(Operand::Literal(text.into()));
    }
    if text.starts_with(['@', '$', '.']) {
        return JsonPath::parse(text).map(Operand::Path);
    }
    serde_json::from_str(text).ok().filter(|value: &Value| !value.is_object()).map(Operand::Literal)
}

impl Step {
    fn of<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        match (self, value) {
            (Step::Field(name), Value::Object(map)) => map.get(name).into_iter().collect(),
            (Step::Index(at), Value::Array(items)) => {
                let at = if *at < 0 { at + items.len() as i64 } else { *at };
                usize::try_from(at).ok().and_then(|at| items.get(at)).into_iter().collect()
            }
            (Step::Slice(from, to, step), Value::Array(items)) => {
                let length = items.len() as i64;
                let place = |at: i64| (if at < 0 { at + length } else { at }).clamp(0, length) as usize;
                let (from, to) = (place(from.unwrap_or(0)), place(to.unwrap_or(length)));
                let range = items.get(from..to).unwrap_or_default();
                range.iter().step_by(usize::try_from(*step).unwrap_or(1)).collect()
            }
            (Step::All, Value::Array(items)) => items.iter().collect(),
            (Step::All, Value::Object(map)) => map.values().collect(),
            (Step::Union(steps), value) => steps.iter().flat_map(|step| step.of(value)).collect(),
            (Step::Descend, value) => {
                let mut found = Vec::new();
                descend(value, &mut found);
                found
            }
            (Step::Filter(filter), Value::Array(items)) => {
                items.iter().filter(|item| filter.passes(item)).collect()
            }
            (Step::Filter(filter), Value::Object(map)) => {
                map.values().filter(|item| filter.passes(item)).collect()
            }
            _ => Vec::new(),
        }
    }
}

fn descend<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    found.push(value);
    match value {
        Value::Array(items) => items.iter().for_each(|item| descend(item, found)),
        Value::Object(map) => map.values().for_each(|item| descend(item, found)),
        _ => {}
    }
}

impl Filter {
    fn passes(&self, item: &Value) -> bool {
        let Some(left) = self.left.of(item) else { return false };
        let Some((operator, right)) = &self.right else { return true };
        let Some(right) = right.of(item) else { return false };
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
    fn of<'v>(&'v self, item: &'v Value) -> Option<&'v Value> {
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
    fn paths() {
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
