//! Measures the parts of a pattern for the limits of Go's parser: height, number of instructions and
//! product of repeat counts.

#[derive(Clone, Copy, Debug, PartialEq)]
enum NodeKind {
    Literal,
    Class,
    Concat,
    Alternate,
    Other,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    kind: NodeKind,
    pub(super) height: u32,
    pub(super) size: u64,
    /// The maximum product of nested repeat counts.
    pub(super) repeat_count: u32,
}

impl Node {
    fn new(shape: NodeKind) -> Node {
        Node { kind: shape, height: 1, size: 1, repeat_count: 1 }
    }

    pub(super) fn leaf() -> Node {
        Node::new(NodeKind::Other)
    }

    pub(super) fn literal() -> Node {
        Node::new(NodeKind::Literal)
    }

    pub(super) fn class() -> Node {
        Node::new(NodeKind::Class)
    }

    fn wrapped(self, size: u64) -> Node {
        Node {
            kind: NodeKind::Other,
            height: self.height + 1,
            size: size.max(1),
            repeat_count: self.repeat_count,
        }
    }

    /// Adds a repetition operator that costs `extra` instructions.
    pub(super) fn with_repeat_operator(self, extra: u64) -> Node {
        self.wrapped(self.size + extra)
    }

    pub(super) fn with_repeat_count(self, min: u32, max: Option<u32>) -> Node {
        let size = match (min, max) {
            (0, None) => 2 + self.size,
            (min, None) => 1 + u64::from(min) * self.size,
            (min, Some(max)) => u64::from(max) * self.size + u64::from(max - min),
        };
        let repeat_count = match max {
            Some(0) => 1,
            Some(times) => times.saturating_mul(self.repeat_count),
            None => min.max(1).saturating_mul(self.repeat_count),
        };
        Node { repeat_count, ..self.wrapped(size) }
    }
}

/// An open group.
#[derive(Debug, Default)]
pub(super) struct Group {
    captures: bool,
    /// The alternatives before the current one.
    alternation: Vec<Node>,
    /// The items of the current alternative.
    parts: Vec<Node>,
}

impl Group {
    pub(super) fn capture() -> Group {
        Group { captures: true, ..Group::default() }
    }

    /// Adds an item. The two literals before it are joined to a string. The last literal stays
    /// separate, because a repetition operator may follow.
    pub(super) fn push(&mut self, node: Node) {
        self.join_literals();
        self.parts.push(node);
    }

    pub(super) fn pop(&mut self) -> Option<Node> {
        self.parts.pop()
    }

    pub(super) fn end_branch(&mut self) {
        self.join_literals();
        let parts = std::mem::take(&mut self.parts);
        let branch = collapse(parts, NodeKind::Concat);
        // Go merges an alternation of classes into one class.
        let is_class =
            |node: &Node| node.kind == NodeKind::Class || node.kind == NodeKind::Literal && node.size == 1;
        match self.alternation.last_mut() {
            Some(last) if is_class(last) && is_class(&branch) => last.kind = NodeKind::Class,
            _ => self.alternation.push(branch),
        }
    }

    pub(super) fn close(&mut self) -> Node {
        self.end_branch();
        let node = collapse(std::mem::take(&mut self.alternation), NodeKind::Alternate);
        match self.captures {
            true => node.wrapped(node.size + 2),
            false => node,
        }
    }

    fn join_literals(&mut self) {
        if let [.., first, second] = self.parts.as_mut_slice()
            && (first.kind, second.kind) == (NodeKind::Literal, NodeKind::Literal)
        {
            first.size += second.size;
            self.parts.pop();
        }
    }
}

/// Merges several nodes into one. Nodes of the same kind are flattened into it.
fn collapse(nodes: Vec<Node>, shape: NodeKind) -> Node {
    if let [node] = nodes[..] {
        return node;
    }
    let separators = if shape == NodeKind::Alternate { nodes.len().saturating_sub(1) as u64 } else { 0 };
    let mut whole = Node { size: 0, height: 0, ..Node::new(shape) };
    for node in nodes {
        whole.size = whole.size.saturating_add(node.size);
        whole.height = whole.height.max(if node.kind == shape { node.height - 1 } else { node.height });
        whole.repeat_count = whole.repeat_count.max(node.repeat_count);
    }
    whole.size = (whole.size + separators).max(1);
    whole.height += 1;
    if whole.height == 1 {
        // An empty expression.
        whole.kind = NodeKind::Other;
    }
    whole
}
