//! A transaction of changes to an nftables table. The kernel applies all of it or nothing.

use crate::{BaseChain, Key, Name, Rule, Set, Verdict};

/// One change. Commands come in an order in which the chains and sets that a rule or an element
/// references exist already.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Creates the table empty, and deletes an existing one first.
    RecreateTable,
    /// Deletes the table. Succeeds if it does not exist.
    DeleteTable,
    AddSet(Name, Set),
    AddChain(Name, Option<BaseChain>),
    /// Deletes all rules of a chain.
    FlushChain(Name),
    AddRule(Name, Rule),
    AddElements(Name, Vec<(Key, Option<Verdict>)>),
    DeleteElements(Name, Vec<(Key, Option<Verdict>)>),
    DeleteChain(Name),
    DeleteSet(Name),
}

/// A list of changes in an order that the kernel accepts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub commands: Vec<Command>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// A batch that deletes the table.
    pub fn delete_table() -> Batch {
        Batch { commands: vec![Command::DeleteTable] }
    }

    pub(crate) fn push(&mut self, command: Command) {
        self.commands.push(command);
    }
}
