//! What the limits of Go's parser are measured on: how high a part of a pattern stacks up, how many instructions
//! it compiles to, and how often its innermost part is repeated.

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Literal,
    Class,
    Concat,
    Alternate,
    Other,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    shape: Shape,
    pub(super) height: u32,
    pub(super) size: u64,
    /// The highest product of nested counted repetitions.
    pub(super) repeats: u32,
}

impl Node {
    fn new(shape: Shape) -> Node {
        Node { shape, height: 1, size: 1, repeats: 1 }
    }

    pub(super) fn leaf() -> Node {
        Node::new(Shape::Other)
    }

    pub(super) fn literal() -> Node {
        Node::new(Shape::Literal)
    }

    pub(super) fn class() -> Node {
        Node::new(Shape::Class)
    }

    fn wrapped(self, size: u64) -> Node {
        Node { shape: Shape::Other, height: self.height + 1, size: size.max(1), repeats: self.repeats }
    }

    /// Repeated by an operator that costs `extra` instructions.
    pub(super) fn repeated(self, extra: u64) -> Node {
        self.wrapped(self.size + extra)
    }

    pub(super) fn counted(self, min: u32, max: Option<u32>) -> Node {
        let size = match (min, max) {
            (0, None) => 2 + self.size,
            (min, None) => 1 + u64::from(min) * self.size,
            (min, Some(max)) => u64::from(max) * self.size + u64::from(max - min),
        };
        let repeats = match max {
            Some(0) => 1,
            Some(times) => times.saturating_mul(self.repeats),
            None => min.max(1).saturating_mul(self.repeats),
        };
        Node { repeats, ..self.wrapped(size) }
    }
}

/// A group that is open.
#[derive(Debug, Default)]
pub(super) struct Group {
    captures: bool,
    /// The alternatives before the current one.
    branches: Vec<Node>,
    /// The parts of the current alternative.
    parts: Vec<Node>,
}

impl Group {
    pub(super) fn capturing() -> Group {
        Group { captures: true, ..Group::default() }
    }

    /// Adds a part. Two literals before it become one string; the last stays apart as long as it may be repeated.
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
        let branch = collapse(parts, Shape::Concat);
        // A choice between classes is one class.
        let is_class =
            |node: &Node| node.shape == Shape::Class || node.shape == Shape::Literal && node.size == 1;
        match self.branches.last_mut() {
            Some(last) if is_class(last) && is_class(&branch) => last.shape = Shape::Class,
            _ => self.branches.push(branch),
        }
    }

    pub(super) fn close(&mut self) -> Node {
        self.end_branch();
        let node = collapse(std::mem::take(&mut self.branches), Shape::Alternate);
        match self.captures {
            true => node.wrapped(node.size + 2),
            false => node,
        }
    }

    fn join_literals(&mut self) {
        if let [.., first, second] = self.parts.as_mut_slice()
            && (first.shape, second.shape) == (Shape::Literal, Shape::Literal)
        {
            first.size += second.size;
            self.parts.pop();
        }
    }
}

/// One node of several, into which those of its own shape dissolve.
fn collapse(nodes: Vec<Node>, shape: Shape) -> Node {
    if let [node] = nodes[..] {
        return node;
    }
    let separators = if shape == Shape::Alternate { nodes.len().saturating_sub(1) as u64 } else { 0 };
    let mut whole = Node { size: 0, height: 0, ..Node::new(shape) };
    for node in nodes {
        whole.size = whole.size.saturating_add(node.size);
        whole.height = whole.height.max(if node.shape == shape { node.height - 1 } else { node.height });
        whole.repeats = whole.repeats.max(node.repeats);
    }
    whole.size = (whole.size + separators).max(1);
    whole.height += 1;
    if whole.height == 1 {
        // Nothing at all.
        whole.shape = Shape::Other;
    }
    whole
}
