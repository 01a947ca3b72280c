//! A unified diff, which some of upstream's error messages contain.

use std::fmt::Write as _;

use serde_json::Value;

use super::internal::format_lines;

const CONTEXT_LINES: usize = 3;
/// With more lines on either side, the middle part is shown as replaced without a comparison.
const MAX_DIFF_LINES: usize = 1000;

/// The diff of two values as indented JSON.
pub(crate) fn diff_json(old: &Value, new: &Value) -> String {
    diff_values("n", old, new)
}

/// The diff of two values of an upstream type, printed as upstream does (see [`internal`](super::internal)).
pub(crate) fn diff_values(name: &str, old: &Value, new: &Value) -> String {
    unified_diff(&format_lines(name, old), &format_lines(name, new))
}

/// The changed lines with three lines of context.
fn unified_diff(old: &[String], new: &[String]) -> String {
    let ops = diff_lines(old, new);
    let mut out = String::new();
    let mut i = 0;
    while let Some(change) = (i..ops.len()).find(|&at| ops[at] != DiffOp::Equal) {
        let start = change.saturating_sub(CONTEXT_LINES).max(i);
        let mut end = change;
        while let Some(next) = (end..ops.len()).find(|&at| ops[at] != DiffOp::Equal) {
            if next > end + 2 * CONTEXT_LINES {
                break;
            }
            end = next + 1;
        }
        end = (end + CONTEXT_LINES).min(ops.len());
        write_diff_section(&mut out, &ops, start..end, old, new);
        i = end;
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DiffOp {
    Equal,
    Delete,
    Insert,
}

fn write_diff_section(
    out: &mut String,
    ops: &[DiffOp],
    range: std::ops::Range<usize>,
    old: &[String],
    new: &[String],
) {
    let count = |ops: &[DiffOp], not: DiffOp| ops.iter().filter(|&&op| op != not).count();
    let before = &ops[..range.start];
    let (mut a, mut b) = (count(before, DiffOp::Insert), count(before, DiffOp::Delete));
    let inside = &ops[range];
    let (in_old, in_new) = (count(inside, DiffOp::Insert), count(inside, DiffOp::Delete));
    let format_range = |start: usize, length: usize| match length {
        1 => format!("{}", start + 1),
        0 => format!("{start},0"),
        _ => format!("{},{length}", start + 1),
    };
    let _ = writeln!(out, "@@ -{} +{} @@", format_range(a, in_old), format_range(b, in_new));
    for op in inside {
        let (sign, line) = match op {
            DiffOp::Equal => (' ', &old[a]),
            DiffOp::Delete => ('-', &old[a]),
            DiffOp::Insert => ('+', &new[b]),
        };
        let _ = writeln!(out, "{sign}{line}");
        a += usize::from(*op != DiffOp::Insert);
        b += usize::from(*op != DiffOp::Delete);
    }
}

/// Computes the longest common subsequence after common prefix and suffix are removed.
fn diff_lines(old: &[String], new: &[String]) -> Vec<DiffOp> {
    let min_len = old.len().min(new.len());
    let head = (0..min_len).take_while(|&i| old[i] == new[i]).count();
    let tail = (0..min_len - head).take_while(|&i| old[old.len() - 1 - i] == new[new.len() - 1 - i]).count();
    let (a, b) = (&old[head..old.len() - tail], &new[head..new.len() - tail]);
    let mut ops = vec![DiffOp::Equal; head];
    if a.len() > MAX_DIFF_LINES || b.len() > MAX_DIFF_LINES {
        ops.extend(vec![DiffOp::Delete; a.len()]);
        ops.extend(vec![DiffOp::Insert; b.len()]);
    } else {
        let width = b.len() + 1;
        let mut common = vec![0_u32; (a.len() + 1) * width];
        for i in (0..a.len()).rev() {
            for j in (0..b.len()).rev() {
                common[i * width + j] = if a[i] == b[j] {
                    common[(i + 1) * width + j + 1] + 1
                } else {
                    common[(i + 1) * width + j].max(common[i * width + j + 1])
                };
            }
        }
        let (mut i, mut j) = (0, 0);
        while i < a.len() || j < b.len() {
            if i < a.len() && j < b.len() && a[i] == b[j] {
                ops.push(DiffOp::Equal);
                (i, j) = (i + 1, j + 1);
            } else if i < a.len()
                && (j == b.len() || common[(i + 1) * width + j] >= common[i * width + j + 1])
            {
                ops.push(DiffOp::Delete);
                i += 1;
            } else {
                ops.push(DiffOp::Insert);
                j += 1;
            }
        }
    }
    ops.extend(vec![DiffOp::Equal; tail]);
    ops
}
