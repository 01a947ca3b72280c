//! A unified diff of two texts, as upstream puts it into a few complaints.

use std::fmt::Write as _;

use serde_json::Value;

use super::internal::lines;

const CONTEXT: usize = 3;
/// Above this many lines on either side the middle is shown as replaced rather than compared.
const MAX_LINES: usize = 1000;

/// The difference of two plain values as indented JSON.
pub(crate) fn unified(old: &Value, new: &Value) -> String {
    of_type("n", old, new)
}

/// The difference of two values of one of upstream's types, as upstream shows them (see `internal`).
pub(crate) fn of_type(name: &str, old: &Value, new: &Value) -> String {
    of_lines(&lines(name, old), &lines(name, new))
}

/// The lines that differ, with three lines around them.
fn of_lines(old: &[String], new: &[String]) -> String {
    let steps = steps(old, new);
    let mut out = String::new();
    let mut i = 0;
    while let Some(change) = (i..steps.len()).find(|&at| steps[at] != Step::Both) {
        let start = change.saturating_sub(CONTEXT).max(i);
        let mut end = change;
        while let Some(next) = (end..steps.len()).find(|&at| steps[at] != Step::Both) {
            if next > end + 2 * CONTEXT {
                break;
            }
            end = next + 1;
        }
        end = (end + CONTEXT).min(steps.len());
        hunk(&mut out, &steps, start..end, old, new);
        i = end;
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Both,
    Old,
    New,
}

fn hunk(out: &mut String, steps: &[Step], range: std::ops::Range<usize>, old: &[String], new: &[String]) {
    let count = |steps: &[Step], not: Step| steps.iter().filter(|&&step| step != not).count();
    let before = &steps[..range.start];
    let (mut a, mut b) = (count(before, Step::New), count(before, Step::Old));
    let inside = &steps[range];
    let (in_old, in_new) = (count(inside, Step::New), count(inside, Step::Old));
    let place = |start: usize, length: usize| match length {
        1 => format!("{}", start + 1),
        0 => format!("{start},0"),
        _ => format!("{},{length}", start + 1),
    };
    let _ = writeln!(out, "@@ -{} +{} @@", place(a, in_old), place(b, in_new));
    for step in inside {
        let (mark, line) = match step {
            Step::Both => (' ', &old[a]),
            Step::Old => ('-', &old[a]),
            Step::New => ('+', &new[b]),
        };
        let _ = writeln!(out, "{mark}{line}");
        a += usize::from(*step != Step::New);
        b += usize::from(*step != Step::Old);
    }
}

/// The longest common subsequence, after equal ends are taken off.
fn steps(old: &[String], new: &[String]) -> Vec<Step> {
    let shorter = old.len().min(new.len());
    let head = (0..shorter).take_while(|&i| old[i] == new[i]).count();
    let tail = (0..shorter - head).take_while(|&i| old[old.len() - 1 - i] == new[new.len() - 1 - i]).count();
    let (a, b) = (&old[head..old.len() - tail], &new[head..new.len() - tail]);
    let mut steps = vec![Step::Both; head];
    if a.len() > MAX_LINES || b.len() > MAX_LINES {
        steps.extend(vec![Step::Old; a.len()]);
        steps.extend(vec![Step::New; b.len()]);
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
                steps.push(Step::Both);
                (i, j) = (i + 1, j + 1);
            } else if i < a.len()
                && (j == b.len() || common[(i + 1) * width + j] >= common[i * width + j + 1])
            {
                steps.push(Step::Old);
                i += 1;
            } else {
                steps.push(Step::New);
                j += 1;
            }
        }
    }
    steps.extend(vec![Step::Both; tail]);
    steps
}
