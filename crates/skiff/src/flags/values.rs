//! What is written in a flag: each kind is read or refused with a word on how it is written.

use jiff::SignedDuration;

#[derive(Clone, Debug)]
pub struct PortRange(pub std::ops::RangeInclusive<u16>);

pub fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    parts.map(|(name, value)| (name.into(), value.into())).ok_or("a label is written name=value".to_owned())
}

pub fn taint(text: &str) -> Result<(String, String, String), String> {
    let wrong =
        || "a taint is written name=value:NoSchedule, with PreferNoSchedule or NoExecute as well".to_owned();
    let (what, effect) = text.rsplit_once(':').ok_or_else(wrong)?;
    let (name, value) = what.split_once('=').unwrap_or((what, ""));
    match effect {
        "NoSchedule" | "PreferNoSchedule" | "NoExecute" if !name.is_empty() => {
            Ok((name.into(), value.into(), effect.into()))
        }
        _ => Err(wrong()),
    }
}

/// As Go writes it: `90s`, `1h30m`. Nobody waits a negative time.
pub fn duration(text: &str) -> Result<SignedDuration, String> {
    let parsed = api::time::parse_duration(text).ok().filter(|time| !time.is_negative());
    parsed.ok_or_else(|| "a time is written as in 90s or 1h30m".to_owned())
}

pub fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("a file mode is three octal digits, as in 600".to_owned()),
    }
}

pub fn port_range(text: &str) -> Result<PortRange, String> {
    let parsed = text.split_once('-').and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    match parsed {
        Some((low, high)) if 0 < low && low <= high => Ok(PortRange(low..=high)),
        _ => Err("a range of ports is two numbers, as in 30000-32767".to_owned()),
    }
}
