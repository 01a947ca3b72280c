//! Development tasks of the repository: `cargo xtask <task>`.

mod deny;
mod schema;
mod tidy;
mod vocabulary;

use std::path::Path;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the workspace");
    match std::env::args().nth(1).as_deref() {
        Some("deny") => deny::run(root),
        Some("schema") => schema::run(root),
        Some("tidy") => tidy::run(root, std::env::args().any(|argument| argument == "--lower")),
        _ => bail!("usage: cargo xtask deny | schema | tidy [--lower]"),
    }
}
