//! What to change in the kernel, all of it or nothing.

use crate::{Base, Key, Name, Rule, Set, Verdict};

/// One change. Sets and chains that an element or a rule names have been made by then.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Makes the table anew, empty, whether there is one or not.
    Renew,
    /// Removes the table, whether there is one or not.
    Remove,
    AddSet(Name, Set),
    AddChain(Name, Option<Base>),
    /// Empties a chain.
    Flush(Name),
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
    pub fn remove() -> Batch {
        Batch { commands: vec![Command::Remove] }
    }

    pub(crate) fn push(&mut self, command: Command) {
        self.commands.push(command);
    }
}
