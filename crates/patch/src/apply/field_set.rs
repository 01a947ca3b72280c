//! Sets of field paths. Counterpart: `fieldpath.Set` in structured-merge-diff.
//!
//! A set is a tree. Each node is a path element and says whether the path up to it is a member of the
//! set. Nodes are sorted, and a node that is no member always has children, so equal sets have equal
//! trees.

use std::cmp::Ordering;
use std::fmt;

use serde_json::{Number, Value};

use crate::go;

/// An element of a field path.
#[derive(Clone, Debug)]
pub(crate) enum PathElement {
    /// A struct field or map key.
    Field(String),
    /// An item of an associative list, by its key fields sorted by name.
    Key(Vec<(String, Value)>),
    /// An item of a set list.
    Value(Value),
    Index(i64),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Set {
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub element: PathElement,
    pub member: bool,
    pub children: Set,
}

impl Set {
    /// The set of these paths, which consist of field names only.
    pub fn of(paths: &[&[&str]]) -> Set {
        let mut set = Set::default();
        for path in paths {
            let mut branch = Set::default();
            for (depth, name) in path.iter().enumerate().rev() {
                let last = depth + 1 == path.len();
                let mut outer = Set::default();
                outer.attach(PathElement::Field((*name).to_owned()), last, branch);
                branch = outer;
            }
            set.add(branch);
        }
        set
    }

    /// Creates a set from unsorted nodes. Nodes with the same element are merged.
    pub fn from_nodes(mut nodes: Vec<Node>) -> Set {
        nodes.retain(|node| node.member || !node.children.is_empty());
        nodes.sort_by(|a, b| a.element.cmp(&b.element));
        let mut set = Set { nodes: Vec::with_capacity(nodes.len()) };
        for node in nodes {
            match set.nodes.last_mut() {
                Some(last) if last.element == node.element => {
                    last.member |= node.member;
                    last.children.add(node.children);
                }
                _ => set.nodes.push(node),
            }
        }
        set
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn nodes_mut(&mut self) -> impl Iterator<Item = &mut Node> {
        self.nodes.iter_mut()
    }

    pub fn get(&self, element: &PathElement) -> Option<&Node> {
        self.position(element).ok().map(|at| &self.nodes[at])
    }

    /// Like `get`, without allocating a path element.
    pub fn field(&self, name: &str) -> Option<&Node> {
        let at = self.nodes.binary_search_by(|node| match &node.element {
            PathElement::Field(field) => field.as_str().cmp(name),
            _ => Ordering::Greater,
        });
        at.ok().map(|at| &self.nodes[at])
    }

    /// Adds the path of one element (if `member`) and everything below it.
    pub fn attach(&mut self, element: PathElement, member: bool, children: Set) {
        if !member && children.is_empty() {
            return;
        }
        // Callers walk sorted maps, so most elements are appended at the end.
        if self.nodes.last().is_none_or(|last| last.element < element) {
            self.nodes.push(Node { element, member, children });
            return;
        }
        match self.position(&element) {
            Ok(at) => {
                self.nodes[at].member |= member;
                self.nodes[at].children.add(children);
            }
            Err(at) => self.nodes.insert(at, Node { element, member, children }),
        }
    }

    /// Adds all paths of `other`.
    pub fn add(&mut self, other: Set) {
        if self.nodes.is_empty() {
            self.nodes = other.nodes;
        } else if !other.nodes.is_empty() {
            // The sort detects the two sorted runs and merges them in linear time.
            let mut nodes = std::mem::take(&mut self.nodes);
            nodes.extend(other.nodes);
            *self = Set::from_nodes(nodes);
        }
    }

    /// Removes the paths in `other`, but not what is below them.
    pub fn subtract(&mut self, other: &Set) {
        self.reduce(other, &mut |node, other_node| {
            node.member &= !other_node.member;
            node.children.subtract(&other_node.children);
        });
    }

    /// Removes the paths in `other` with everything below them.
    pub fn subtract_trees(&mut self, other: &Set) {
        self.reduce(other, &mut |node, other_node| {
            if other_node.member {
                node.member = false;
                node.children = Set::default();
            } else {
                node.children.subtract_trees(&other_node.children);
            }
        });
    }

    pub fn intersection(&self, other: &Set) -> Set {
        let nodes = self.nodes.iter().filter_map(|node| {
            let other_node = other.get(&node.element)?;
            let member = node.member && other_node.member;
            let children = node.children.intersection(&other_node.children);
            (member || !children.is_empty()).then(|| Node { element: node.element.clone(), member, children })
        });
        Set { nodes: nodes.collect() }
    }

    /// Whether `path` is a member of the set.
    #[cfg(test)]
    pub fn has(&self, path: &[PathElement]) -> bool {
        match path {
            [] => false,
            [last] => self.get(last).is_some_and(|node| node.member),
            [first, rest @ ..] => self.get(first).is_some_and(|node| node.children.has(rest)),
        }
    }

    /// The paths in upstream's format. At each level, members come before paths that continue.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.collect_paths("", &mut paths);
        paths
    }

    fn collect_paths(&self, prefix: &str, paths: &mut Vec<String>) {
        let members = self.nodes.iter().filter(|node| node.member);
        paths.extend(members.map(|node| format!("{prefix}{}", node.element)));
        for node in self.nodes.iter().filter(|node| !node.children.is_empty()) {
            node.children.collect_paths(&format!("{prefix}{}", node.element), paths);
        }
    }

    /// Calls `cut` for each node that both sets have. Nodes that are empty afterwards are removed.
    fn reduce(&mut self, other: &Set, cut: &mut dyn FnMut(&mut Node, &Node)) {
        if other.is_empty() {
            return;
        }
        self.nodes.retain_mut(|node| {
            if let Some(other_node) = other.get(&node.element) {
                cut(node, other_node);
            }
            node.member || !node.children.is_empty()
        });
    }

    fn position(&self, element: &PathElement) -> Result<usize, usize> {
        self.nodes.binary_search_by(|node| node.element.cmp(element))
    }
}

impl PathElement {
    fn rank(&self) -> u8 {
        match self {
            PathElement::Field(_) => 0,
            PathElement::Key(_) => 1,
            PathElement::Value(_) => 2,
            PathElement::Index(_) => 3,
        }
    }
}

impl Ord for PathElement {
    fn cmp(&self, other: &PathElement) -> Ordering {
        match (self, other) {
            (PathElement::Field(a), PathElement::Field(b)) => a.cmp(b),
            (PathElement::Key(a), PathElement::Key(b)) => {
                let pairs = a.iter().zip(b).map(|(a, b)| a.0.cmp(&b.0).then_with(|| order(&a.1, &b.1)));
                pairs.into_iter().find(|order| order.is_ne()).unwrap_or_else(|| a.len().cmp(&b.len()))
            }
            (PathElement::Value(a), PathElement::Value(b)) => order(a, b),
            (PathElement::Index(a), PathElement::Index(b)) => a.cmp(b),
            _ => self.rank().cmp(&other.rank()),
        }
    }
}

impl PartialOrd for PathElement {
    fn partial_cmp(&self, other: &PathElement) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PathElement {
    fn eq(&self, other: &PathElement) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for PathElement {}

impl fmt::Display for PathElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathElement::Field(name) => write!(f, ".{name}"),
            PathElement::Key(fields) => {
                let fields: Vec<String> =
                    fields.iter().map(|(name, value)| format!("{name}={}", format_value(value))).collect();
                write!(f, "[{}]", fields.join(","))
            }
            PathElement::Value(value) => write!(f, "[={}]", format_value(value)),
            PathElement::Index(at) => write!(f, "[{at}]"),
        }
    }
}

/// Formats a value within a path.
fn format_value(value: &Value) -> String {
    match value {
        Value::String(text) => go::quote(text),
        Value::Number(n) if n.is_f64() => n.as_f64().unwrap_or(0.0).to_string(),
        Value::Array(items) => format!("[{}]", items.iter().map(format_value).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| format!("{name}={}", format_value(value))).collect()
        }
        other => other.to_string(),
    }
}

/// Whether two values are equal. Numbers are compared by value: 1 equals 1.0.
pub(crate) fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => number_order(a, b).is_eq(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && same(a.1, b.1))
        }
        _ => a == b,
    }
}

/// A total order of values. Numbers are ordered by value.
fn order(a: &Value, b: &Value) -> Ordering {
    let rank = |value: &Value| match value {
        Value::Number(_) => 0,
        Value::String(_) => 1,
        Value::Bool(_) => 2,
        Value::Array(_) => 3,
        Value::Object(_) => 4,
        Value::Null => 5,
    };
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => number_order(a, b),
        (Value::String(a), Value::String(b)) => a.cmp(b),
        (Value::Bool(a), Value::Bool(b)) => a.cmp(b),
        (Value::Array(a), Value::Array(b)) => {
            let items = a.iter().zip(b).map(|(a, b)| order(a, b));
            items.into_iter().find(|order| order.is_ne()).unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (Value::Object(a), Value::Object(b)) => {
            let fields = a.iter().zip(b).map(|(a, b)| a.0.cmp(b.0).then_with(|| order(a.1, b.1)));
            fields.into_iter().find(|order| order.is_ne()).unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        _ => rank(a).cmp(&rank(b)),
    }
}

fn number_order(a: &Number, b: &Number) -> Ordering {
    if let (Some(a), Some(b)) = (a.as_i64(), b.as_i64()) {
        return a.cmp(&b);
    }
    if let (Some(a), Some(b)) = (a.as_u64(), b.as_u64()) {
        return a.cmp(&b);
    }
    a.as_f64().unwrap_or(0.0).total_cmp(&b.as_f64().unwrap_or(0.0))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_element() -> impl Strategy<Value = PathElement> {
        prop_oneof![
            "[abc]".prop_map(PathElement::Field),
            "[abc]".prop_map(|name| PathElement::Key(vec![("name".to_owned(), name.into())])),
            (0..3i64).prop_map(|n| PathElement::Value(n.into())),
        ]
    }

    pub(crate) fn any_set() -> impl Strategy<Value = Set> {
        prop::collection::vec(prop::collection::vec(any_element(), 1..4), 0..8).prop_map(|paths| {
            let mut set = Set::default();
            for path in paths {
                let mut branch = Set::default();
                for (depth, element) in path.into_iter().rev().enumerate() {
                    let mut outer = Set::default();
                    outer.attach(element, depth == 0, branch);
                    branch = outer;
                }
                set.add(branch);
            }
            set
        })
    }

    fn union(a: &Set, b: &Set) -> Set {
        let mut both = a.clone();
        both.add(b.clone());
        both
    }

    fn difference(a: &Set, b: &Set) -> Set {
        let mut left = a.clone();
        left.subtract(b);
        left
    }

    proptest! {
        #[test]
        fn set_operations_are_consistent(a in any_set(), b in any_set(), c in any_set()) {
            prop_assert_eq!(union(&a, &b), union(&b, &a));
            prop_assert_eq!(union(&union(&a, &b), &c), union(&a, &union(&b, &c)));
            prop_assert_eq!(union(&a, &a), a.clone());
            prop_assert_eq!(a.intersection(&b), b.intersection(&a));
            prop_assert_eq!(difference(&a, &a), Set::default());
            prop_assert_eq!(union(&difference(&a, &b), &a.intersection(&b)), a.clone());
            prop_assert_eq!(difference(&a, &union(&b, &c)), difference(&difference(&a, &b), &c));
            prop_assert_eq!(
                a.intersection(&union(&b, &c)),
                union(&a.intersection(&b), &a.intersection(&c))
            );
        }

        #[test]
        fn subtract_trees_drops_children(a in any_set(), b in any_set()) {
            let mut left = a.clone();
            left.subtract_trees(&b);
            prop_assert_eq!(left.intersection(&b), Set::default());
            prop_assert_eq!(left.intersection(&a), left.clone());
            let removed = b.paths();
            prop_assert!(left.paths().iter().all(|path| !removed.iter().any(|removed_path| path == removed_path)));
        }
    }

    #[test]
    fn integer_and_float_values_have_one_order() {
        let one = PathElement::Value(serde_json::json!(1));
        assert_eq!(one, PathElement::Value(serde_json::json!(1.0)));
        assert!(one < PathElement::Value(serde_json::json!(1.5)));
        assert!(one < PathElement::Value(serde_json::json!("a")));
        assert!(PathElement::Field("z".to_owned()) < one);
        let set = Set::of(&[&["a"], &["a", "b"], &["c", "d"]]);
        assert_eq!(set.paths(), [".a", ".a.b", ".c.d"]);
        assert!(set.has(&[PathElement::Field("a".to_owned())]));
        assert!(!set.has(&[PathElement::Field("c".to_owned())]));
        assert!(set.field("c").is_some() && set.field("b").is_none());
    }
}
