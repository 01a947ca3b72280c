//! What to change in the kernel, all of it or nothing.

use crate::{BaseChain, Key, Name, Rule, Set, Verdict};

/// One change. Sets and chains that an element or a rule names have been made by then.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Makes the table anew, empty, whether there is one or not.
    RecreateTable,
    /// Removes the table, whether there is one or not.
    DeleteTable,
    AddSet(Name, Set),
    AddChain(Name, Option<BaseChain>),
    /// Empties a chain.
    FlushChain(Name),
    AddRule(Name, Rule),
    AddElements(Name, Vec<(Key, Option<Verdict>)>),
    DeleteElements(Name, Vec<(Key, Option<Verdict>)>),
    DeleteChain(Name),
    DeleteSet(Name),
}

/// Changes in an order in which the kernel takes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub commands: Vec<Command>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Removes the table.
    pub fn delete_table() -> Batch {
        Batch { commands: vec![Command::DeleteTable] }
    }

    pub(crate) fn push(&mut self, command: Command) {
        self.commands.push(command);
    }
}
