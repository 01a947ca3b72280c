//! The tree of an expression: nodes in one vector, named by their index. Macros are expanded while parsing, so
//! loops are [`Fold`]s only.

pub(crate) type Id = u32;

/// The accumulator of macros; no expression can write this name.
pub(crate) const ACCUMULATOR_NAME: &str = "@result";

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
pub(crate) enum ExprKind {
    /// Where something was wrong; it has been complained about.
    Unspecified,
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
    Comprehension(Box<Comprehension>),
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub key: Id,
    pub value: Id,
    pub optional: bool,
}

#[derive(Debug)]
pub(crate) struct Field {
    pub offset: u32,
    pub name: String,
    pub value: Id,
    pub optional: bool,
}

/// `accumulator = init; for each variable in range while condition { accumulator = step }; result`.
#[derive(Debug)]
pub(crate) struct Comprehension {
    pub iter_range: Id,
    pub iter_var: String,
    /// With a second variable the first is the index or key and this one the element or value.
    pub iter_var2: Option<String>,
    pub accu_var: String,
    pub accu_init: Id,
    pub loop_condition: Id,
    pub loop_step: Id,
    pub result: Id,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub kind: ExprKind,
    /// In characters from the start.
    pub offset: u32,
    /// How deep the tree below is; every recursion over the tree is bounded by it.
    pub height: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Ast {
    nodes: Vec<Node>,
    pub root: Id,
}

impl Ast {
    pub fn add(&mut self, at: u32, kind: ExprKind) -> Id {
        let height = 1 + self.children(&kind).map(|id| self.node(id).height).max().unwrap_or(0);
        self.nodes.push(Node { kind, offset: at, height });
        (self.nodes.len() - 1) as Id
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id as usize]
    }

    pub fn kind(&self, id: Id) -> &ExprKind {
        &self.nodes[id as usize].kind
    }

    /// The node's kind, leaving it broken until it is set again.
    pub fn take(&mut self, id: Id) -> ExprKind {
        std::mem::replace(&mut self.nodes[id as usize].kind, ExprKind::Unspecified)
    }

    pub fn set(&mut self, id: Id, kind: ExprKind) {
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
            ExprKind::Ident(name) => Some(name.clone()),
            ExprKind::Select { operand, field, test: false } => {
                Some(format!("{}.{field}", self.qualified_name(*operand)?))
            }
            _ => None,
        }
    }

    pub fn children<'a>(&self, kind: &'a ExprKind) -> Box<dyn Iterator<Item = Id> + 'a> {
        match kind {
            ExprKind::Unspecified | ExprKind::Literal(_) | ExprKind::Ident(_) => Box::new([].into_iter()),
            ExprKind::Select { operand, .. } => Box::new([*operand].into_iter()),
            ExprKind::Call { target, args, .. } => Box::new(target.iter().chain(args).copied()),
            ExprKind::List { items, .. } => Box::new(items.iter().copied()),
            ExprKind::Map(entries) => Box::new(entries.iter().flat_map(|entry| [entry.key, entry.value])),
            ExprKind::Struct { fields, .. } => Box::new(fields.iter().map(|field| field.value)),
            ExprKind::Comprehension(fold) => Box::new(
                [fold.iter_range, fold.accu_init, fold.loop_condition, fold.loop_step, fold.result]
                    .into_iter(),
            ),
        }
    }
}
