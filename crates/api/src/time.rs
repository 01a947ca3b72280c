//! Durations as people read them.

use jiff::SignedDuration;

/// A duration in one or two units, the coarser the longer: `45s`, `3m20s`, `5h`, `9d`, `2y30d`. Up to two
/// seconds in the future count as now, since clocks differ; more is `<invalid>`.
pub fn human_duration(duration: SignedDuration) -> String {
    let seconds = duration.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{unit}"),
        _ => format!("{big}{unit}{small}{small_unit}"),
    };
    match () {
        () if seconds < -1 => "<invalid>".to_owned(),
        () if seconds < 0 => "0s".to_owned(),
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => two(minutes, "m", seconds % 60, "s"),
        () if minutes < 180 => format!("{minutes}m"),
        () if hours < 8 => two(hours, "h", minutes % 60, "m"),
        () if hours < 48 => format!("{hours}h"),
        () if hours < 192 => two(days, "d", hours % 24, "h"),
        () if days < 730 => format!("{days}d"),
        () if days < 2920 => two(days / 365, "y", days % 365, "d"),
        () => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_the_coarser() {
        let (minute, hour, day) = (60, 3600, 86_400);
        for (seconds, expected) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (10 * minute, "10m"),
            (10 * minute + 1, "10m"),
            (179 * minute, "179m"),
            (3 * hour, "3h"),
            (3 * hour + 5 * minute, "3h5m"),
            (8 * hour + 5 * minute, "8h"),
            (47 * hour, "47h"),
            (2 * day, "2d"),
            (2 * day + hour, "2d1h"),
            (8 * day + hour, "8d"),
            (729 * day, "729d"),
            (730 * day, "2y"),
            (760 * day, "2y30d"),
            (8 * 365 * day + day, "8y"),
            (i64::MAX, "292471208677y"),
        ] {
            assert_eq!(human_duration(SignedDuration::from_secs(seconds)), expected, "{seconds}");
        }
        assert_eq!(human_duration(SignedDuration::from_millis(-1900)), "0s");
        assert_eq!(human_duration(SignedDuration::from_millis(-2000)), "<invalid>");
    }
}
