//! The text of an expression, positions in it, and complaints about it in the form cel-go prints, since they end
//! up in front of users: `ERROR: <input>:1:5: undeclared reference to 'x' (in container '')` with the line and a
//! caret below it.

use std::fmt;

/// One complaint with its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// Characters from the start of the expression; none when it is about the whole of it.
    pub at: Option<u32>,
    /// What is wrong.
    pub message: String,
}

/// What is wrong with an expression. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Errors {
    source: String,
    complaints: Vec<Complaint>,
    beyond: usize,
}

const MOST: usize = 100;
/// Longer lines are not shown below a complaint.
const LONGEST_LINE: usize = 16384;

impl Errors {
    pub(crate) fn new(source: &str) -> Errors {
        Errors { source: source.to_owned(), complaints: Vec::new(), beyond: 0 }
    }

    pub(crate) fn report(&mut self, at: Option<u32>, message: String) {
        if self.complaints.len() < MOST {
            self.complaints.push(Complaint { at, message });
        } else {
            self.beyond += 1;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.complaints.is_empty()
    }

    /// The complaints in the order of their positions.
    pub fn complaints(&self) -> Vec<&Complaint> {
        let mut sorted: Vec<&Complaint> = self.complaints.iter().collect();
        sorted.sort_by_key(|complaint| complaint.at.map_or(0, |at| at + 1));
        sorted
    }

    fn place(&self, at: Option<u32>) -> (usize, usize, Option<&str>) {
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

    fn show(&self, complaint: &Complaint, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column, text) = self.place(complaint.at);
        let (line_shown, column_shown) =
            if complaint.at.is_some() { (line as i64, column as i64 + 1) } else { (-1, 0) };
        write!(f, "ERROR: <input>:{line_shown}:{column_shown}: {}", complaint.message)?;
        let Some(text) = text.filter(|text| text.len() <= LONGEST_LINE) else { return Ok(()) };
        let text = text.replace('\t', " ");
        let dots: String =
            text.chars().take(column).map(|c| if c.len_utf8() > 1 { '\u{ff0e}' } else { '.' }).collect();
        let caret = if text.chars().nth(column).is_some_and(|c| c.len_utf8() > 1) { '\u{ff3e}' } else { '^' };
        write!(f, "\n | {text}\n | {dots}{caret}")
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, complaint) in self.complaints().into_iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            self.show(complaint, f)?;
        }
        if self.beyond > 0 {
            write!(f, "\n{} more errors were truncated", self.beyond)?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}
