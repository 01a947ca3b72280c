//! Index lists of Indexed Jobs, such as `1,3-5,7`.

/// Returns the number of indexes in the list. They must be ascending and below `completions`.
pub(super) fn validate_index_ranges(list: &str, completions: i64) -> Result<i64, String> {
    if list.is_empty() {
        return Ok(0);
    }
    let (mut total, mut last) = (0_i64, None);
    for part in list.split(',') {
        let (first, end) = parse_interval(part, completions)?;
        if let Some(last) = last.filter(|&last| last >= first) {
            return Err(format!("non-increasing order, previous: {last}, current: {first}"));
        }
        total += end - first + 1;
        last = Some(end);
    }
    Ok(total)
}

/// The first index that is in both lists. Invalid parts are ignored.
pub(super) fn first_overlap(completed: &str, failed: &str, completions: i64) -> Option<i64> {
    let parts = |list: &str| {
        list.split(',').filter_map(|part| parse_interval(part, completions).ok()).collect::<Vec<_>>()
    };
    let (completed, failed) = (parts(completed), parts(failed));
    let (mut i, mut j) = (0, 0);
    while let (Some(a), Some(b)) = (completed.get(i), failed.get(j)) {
        if a.0 <= b.1 && b.0 <= a.1 {
            return Some(a.0.max(b.0));
        }
        if a.0 <= b.0 { i += 1 } else { j += 1 }
    }
    None
}

fn parse_interval(part: &str, completions: i64) -> Result<(i64, i64), String> {
    let number = |text: &str| {
        let number = text.parse::<i64>().map_err(|_| {
            format!("cannot convert string to integer for index: {}", crate::field::quote(text))
        })?;
        if number >= completions {
            return Err(format!("too large index: {}", crate::field::quote(text)));
        }
        Ok(number)
    };
    let limits: Vec<&str> = part.split('-').collect();
    match limits.as_slice() {
        [only] => number(only).map(|number| (number, number)),
        [first, end] => {
            let (first, end) = (number(first)?, number(end)?);
            if first >= end {
                return Err(format!("non-increasing order, previous: {first}, current: {end}"));
            }
            Ok((first, end))
        }
        _ => Err(format!(
            "the fragment {} violates the requirement that an index interval can have at most two parts separated by '-'",
            crate::field::quote(part)
        )),
    }
}
