//! Standard output of the commands. These macros replace those of the standard library, which panic if
//! the reader has closed the pipe (`skiff check | head -1`).

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};

/// The exit status that a shell reports for a process that SIGPIPE has killed.
const SIGPIPE_STATUS: i32 = 128 + 13;

macro_rules! print {
    ($($argument:tt)*) => { $crate::output::write(format_args!($($argument)*)) };
}

macro_rules! println {
    ($($argument:tt)*) => { print!("{}\n", format_args!($($argument)*)) };
}

/// Writes to standard output. Exits if that fails, because the rest of the output would be lost as
/// well.
pub fn write(text: Arguments<'_>) {
    let Err(error) = std::io::stdout().lock().write_fmt(text) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(SIGPIPE_STATUS);
    }
    eprintln!("skiff: cannot write to standard output: {error}");
    std::process::exit(1);
}
