//! The tree of an expression: nodes in one vector, named by their index. Macros are expanded while parsing, so
//! loops are [`Fold`]s only.

pub(crate) type Id = u32;

/// The accumulator of macros; no expression can write this name.
pub(crate) const ACCUMULATOR: &str = "@result";

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Literal {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(String),
    Bytes(Vec<u8>),
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// Where something was wrong; it has been complained about.
    Broken,
    Literal(Literal),
    Ident(String),
    Select {
        operand: Id,
        field: String,
        test: bool,
    },
    Call {
        function: String,
        target: Option<Id>,
        args: Vec<Id>,
    },
    List {
        items: Vec<Id>,
        optional: Vec<bool>,
    },
    Map(Vec<Entry>),
    Struct {
        name: String,
        fields: Vec<Field>,
    },
    Fold(Box<Fold>),
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub key: Id,
    pub value: Id,
    pub optional: bool,
}

#[derive(Debug)]
pub(crate) struct Field {
    pub at: u32,
    pub name: String,
    pub value: Id,
    pub optional: bool,
}

/// `accumulator = init; for each variable in range while condition { accumulator = step }; result`.
#[derive(Debug)]
pub(crate) struct Fold {
    pub range: Id,
    pub variable: String,
    /// With a second variable the first is the index or key and this one the element or value.
    pub second: Option<String>,
    pub accumulator: String,
    pub init: Id,
    pub condition: Id,
    pub step: Id,
    pub result: Id,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub kind: Kind,
    /// In characters from the start.
    pub at: u32,
    /// How deep the tree below is; every recursion over the tree is bounded by it.
    pub height: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Ast {
    nodes: Vec<Node>,
    pub root: Id,
}

impl Ast {
    pub fn add(&mut self, at: u32, kind: Kind) -> Id {
        let height = 1 + self.children(&kind).map(|id| self.node(id).height).max().unwrap_or(0);
        self.nodes.push(Node { kind, at, height });
        (self.nodes.len() - 1) as Id
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id as usize]
    }

    pub fn kind(&self, id: Id) -> &Kind {
        &self.nodes[id as usize].kind
    }

    /// The node's kind, leaving it broken until it is set again.
    pub fn take(&mut self, id: Id) -> Kind {
        std::mem::replace(&mut self.nodes[id as usize].kind, Kind::Broken)
    }

    pub fn set(&mut self, id: Id, kind: Kind) {
        self.nodes[id as usize].kind = kind;
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn ids(&self) -> impl Iterator<Item = Id> + use<> {
        0..self.nodes.len() as Id
    }

    /// `a.b.c` as a name, if it is nothing but identifiers.
    pub fn qualified_name(&self, id: Id) -> Option<String> {
        match self.kind(id) {
            Kind::Ident(name) => Some(name.clone()),
            Kind::Select { operand, field, test: false } => {
                Some(format!("{}.{field}", self.qualified_name(*operand)?))
            }
            _ => None,
        }
    }

    pub fn children<'a>(&self, kind: &'a Kind) -> Box<dyn Iterator<Item = Id> + 'a> {
        match kind {
            Kind::Broken | Kind::Literal(_) | Kind::Ident(_) => Box::new([].into_iter()),
            Kind::Select { operand, .. } => Box::new([*operand].into_iter()),
            Kind::Call { target, args, .. } => Box::new(target.iter().chain(args).copied()),
            Kind::List { items, .. } => Box::new(items.iter().copied()),
            Kind::Map(entries) => Box::new(entries.iter().flat_map(|entry| [entry.key, entry.value])),
            Kind::Struct { fields, .. } => Box::new(fields.iter().map(|field| field.value)),
            Kind::Fold(fold) => {
                Box::new([fold.range, fold.init, fold.condition, fold.step, fold.result].into_iter())
            }
        }
    }
}
