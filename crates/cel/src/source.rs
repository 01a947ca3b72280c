//! Compile errors with their positions, formatted exactly as by cel-go, because users see them: `ERROR:
//! <input>:1:5: undeclared reference to 'x' (in container '')`, with the line and a caret below it.

use std::fmt;

/// A compile error with its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileError {
    /// The offset in characters; `None` if the error is about the whole expression.
    pub offset: Option<u32>,
    /// The error message.
    pub message: String,
}

/// The errors of an expression. Never empty once it is returned to a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Errors {
    source: String,
    errors: Vec<CompileError>,
    truncated: usize,
}

const MAX_ERRORS: usize = 100;
/// Longer lines are not shown below an error.
const MAX_SNIPPET_LENGTH: usize = 16384;

impl Errors {
    pub(crate) fn new(source: &str) -> Errors {
        Errors { source: source.to_owned(), errors: Vec::new(), truncated: 0 }
    }

    pub(crate) fn report(&mut self, at: Option<u32>, message: String) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(CompileError { offset: at, message });
        } else {
            self.truncated += 1;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }

    /// The errors sorted by position.
    pub fn sorted_errors(&self) -> Vec<&CompileError> {
        let mut sorted: Vec<&CompileError> = self.errors.iter().collect();
        sorted.sort_by_key(|error| error.offset.map_or(0, |at| at + 1));
        sorted
    }

    fn location(&self, at: Option<u32>) -> (usize, usize, Option<&str>) {
        let Some(at) = at else { return (0, 0, None) };
        let mut left = at as usize;
        let mut lines = self.source.split('\n').enumerate();
        let mut last = (1, 0, None);
        for (number, line) in &mut lines {
            let length = line.chars().count();
            last = (number + 1, left.min(length), Some(line));
            if left <= length {
                break;
            }
            left -= length + 1;
        }
        last
    }

    fn format_error(&self, error: &CompileError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column, text) = self.location(error.offset);
        let (display_line, display_column) =
            if error.offset.is_some() { (line as i64, column as i64 + 1) } else { (-1, 0) };
        write!(f, "ERROR: <input>:{display_line}:{display_column}: {}", error.message)?;
        let Some(text) = text.filter(|text| text.len() <= MAX_SNIPPET_LENGTH) else { return Ok(()) };
        let text = text.replace('\t', " ");
        let dots: String =
            text.chars().take(column).map(|c| if c.len_utf8() > 1 { '\u{ff0e}' } else { '.' }).collect();
        let caret = if text.chars().nth(column).is_some_and(|c| c.len_utf8() > 1) { '\u{ff3e}' } else { '^' };
        write!(f, "\n | {text}\n | {dots}{caret}")
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.sorted_errors().into_iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            self.format_error(error, f)?;
        }
        if self.truncated > 0 {
            write!(f, "\n{} more errors were truncated", self.truncated)?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}
