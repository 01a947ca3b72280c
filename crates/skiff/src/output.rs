//! Standard output of the commands. The macros replace those of the standard library, which panic when the reader is gone
//! (`skiff check | head -1`).

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};

/// What a shell reports for a program that SIGPIPE has ended.
const SIGPIPE_STATUS: i32 = 128 + 13;

macro_rules! print {
    ($($argument:tt)*) => { $crate::output::write(format_args!($($argument)*)) };
}

macro_rules! println {
    ($($argument:tt)*) => { print!("{}\n", format_args!($($argument)*)) };
}

/// Writes to standard output. Output that cannot be written ends the program: the rest would be lost, too.
pub fn write(text: Arguments<'_>) {
    let Err(error) = std::io::stdout().lock().write_fmt(text) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(SIGPIPE_STATUS);
    }
    eprintln!("skiff: cannot write to standard output: {error}");
    std::process::exit(1);
}
