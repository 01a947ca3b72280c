//! The syntax tree of an expression. Nodes are stored in one vector and referenced by index. Macros are
//! expanded while parsing, so [`Comprehension`] is the only kind of loop.

pub(crate) type Id = u32;

/// The name of the accumulator in expanded macros. It is not a valid identifier, so expressions cannot
/// use it.
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
    /// An invalid expression. The error has been reported.
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

/// `accu_var = accu_init; for each iter_var in iter_range while loop_condition { accu_var = loop_step
/// }; result`.
#[derive(Debug)]
pub(crate) struct Comprehension {
    pub iter_range: Id,
    pub iter_var: String,
    /// With a second variable, the first one is the index or key and this one the element or value.
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
    /// The offset in the source, in characters.
    pub offset: u32,
    /// The height of the subtree. It limits the depth of all recursion over the tree.
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

    /// Takes the node's kind out. The node is unspecified until `set` is called.
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

    /// The dotted name `a.b.c`, if the node consists only of identifiers.
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
