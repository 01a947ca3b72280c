//! The node: runs the pods it is given in real containers and says what becomes of them.
//!
//! Every pod has a worker that looks at what the runtime has of it ([`observed`]), decides what it needs next
//! ([`pod::plan`], pure), does it, and writes what there is to say ([`pod::status`], pure). Containers outlive
//! this process; a new one finds them again by their labels.

pub mod memory;
pub mod observed;
pub mod pod;
