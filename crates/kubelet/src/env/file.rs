//! Parses environment files that containers write: `NAME='value'` as in a shell. The text between
//! single quotes is literal and may span lines.
//!
//! The content is not trusted, so line length and total size are limited.

use std::io::{BufRead, Read as _};

/// As upstream.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Larger files are not read to the end. No process could receive as much environment anyway.
const MAX_FILE_BYTES: usize = 1 << 20;

const WHITESPACE: [char; 2] = [' ', '\t'];

/// The value of a variable. Reading stops at the first match, so later errors are not detected.
pub fn find_variable(file: &mut dyn BufRead, key: &str) -> Result<Option<String>, String> {
    let mut lines = Lines { file, number: 0, left: MAX_FILE_BYTES };
    while let Some(line) = lines.next()? {
        let line = line.trim_start_matches(WHITESPACE);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let syntax_error = |why: &str| Err(format!("line {}: {why}", lines.number));
        let Some((name, value)) = line.split_once('=') else { return syntax_error("missing '='") };
        if name.trim_end_matches(WHITESPACE).is_empty() {
            return syntax_error("empty variable name");
        }
        if name.ends_with(WHITESPACE) {
            return syntax_error("whitespace before '=' is not allowed");
        }
        // For a shell, `NAME= value` sets an empty value for one command. Such lines are skipped.
        if value.starts_with(WHITESPACE) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let Some(quoted) = value.strip_prefix('\'') else {
            return syntax_error("value must be enclosed in single quotes");
        };
        let (name, quoted) = (name.to_owned(), quoted.to_owned());
        let value = lines.until_quote(quoted)?;
        if name == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

struct Lines<'a> {
    file: &'a mut dyn BufRead,
    number: usize,
    /// The number of bytes that may still be read.
    left: usize,
}

impl Lines<'_> {
    fn next(&mut self) -> Result<Option<String>, String> {
        let mut line = Vec::new();
        let read = (&mut *self.file).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        let read = read.map_err(|error| error.to_string())?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let limit_error = || format!("more than {MAX_FILE_BYTES} bytes would have to be read");
        self.left = self.left.checked_sub(read).ok_or_else(limit_error)?;
        match line.pop_if(|last| *last == b'\n') {
            Some(_) => drop(line.pop_if(|last| *last == b'\r')),
            None if line.len() as u64 == MAX_LINE_BYTES => {
                return Err(format!("line {} is too long", self.number));
            }
            None => {}
        }
        Ok(Some(String::from_utf8_lossy(&line).into_owned()))
    }

    /// Reads up to the closing quote, which must end its line.
    fn until_quote(&mut self, first: String) -> Result<String, String> {
        let (mut value, mut rest, start_line) = (String::new(), first, self.number);
        loop {
            if let Some((last, trailing)) = rest.split_once('\'') {
                let trailing = trailing.trim_start_matches(WHITESPACE);
                if !trailing.is_empty() && !trailing.starts_with('#') {
                    return Err(format!("line {}: unexpected content after closing quote", self.number));
                }
                return Ok(value + last);
            }
            value += &rest;
            value.push('\n');
            let unclosed = || format!("starting at line {start_line}: unclosed single quote");
            rest = self.next()?.ok_or_else(unclosed)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<Option<&str>, &str>) {
        let found = find_variable(&mut text.as_bytes(), "X");
        let found = found.as_ref().map(Option::as_deref).map_err(String::as_str);
        assert_eq!(found, expected, "{:?}", text.get(..200).unwrap_or(text));
    }

    #[test]
    fn valid_files_are_parsed() {
        check("", Ok(None));
        check("X='1'", Ok(Some("1")));
        check("# X='0'\n\n \t\n  X='1' # one\n", Ok(Some("1")));
        check("A='x'\r\nX='1'\r\n", Ok(Some("1")));
        check("X='  a $B \\n \"c\" = # d '\n", Ok(Some("  a $B \\n \"c\" = # d ")));
        check("A='two\nX=\nlines'\nX='three\n\n  lines'", Ok(Some("three\n\n  lines")));
        check("X='1'\nX='2'\nnonsense", Ok(Some("1")));
        check("X=''", Ok(Some("")));
        check("X= '1'\nX='2'", Ok(None));
        check("A= nonsense\nX='2'", Ok(Some("2")));
        check("XY='1'\nxX='2'", Ok(None));
    }

    #[test]
    fn invalid_files_are_rejected() {
        check("X", Err("line 1: missing '='"));
        check("A='1'\n='1'", Err("line 2: empty variable name"));
        check("X ='1'", Err("line 1: whitespace before '=' is not allowed"));
        check("X=1", Err("line 1: value must be enclosed in single quotes"));
        check("X=\"1\"", Err("line 1: value must be enclosed in single quotes"));
        check("X=", Err("line 1: value must be enclosed in single quotes"));
        check("X='1''2'", Err("line 1: unexpected content after closing quote"));
        check("A='a\n\nX='2'", Err("line 3: unexpected content after closing quote"));
        check("\nX='1\n\n", Err("starting at line 2: unclosed single quote"));
        check(&"#".repeat(1 << 20), Err("line 1 is too long"));
        let limit_error = Err("more than 1048576 bytes would have to be read");
        check(&format!("X='{}", "a\n".repeat(2 << 20)), limit_error);
        check(&"#\n".repeat(1 << 20), limit_error);
        check(&format!("{}X='1'", "#\n".repeat((1 << 19) - 2)), limit_error);
        check(&format!("{}X='1'", "#\n".repeat((1 << 19) - 3)), Ok(Some("1")));
    }

    proptest::proptest! {
        #[test]
        fn quoted_values_round_trip(value in "[^'\r]{0,50}", text in "\\PC{0,50}") {
            let written = format!("A='{value}'\nX='{value}'");
            proptest::prop_assert_eq!(find_variable(&mut written.as_bytes(), "X"), Ok(Some(value)));
            let _ = find_variable(&mut text.as_bytes(), "X");
        }
    }
}
