//! Parsers of flag values. clap prints the flag and the value before the message.

use jiff::SignedDuration;

#[derive(Clone, Debug)]
pub struct PortRange(pub std::ops::RangeInclusive<u16>);

pub fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    parts.map(|(name, value)| (name.into(), value.into())).ok_or("must be key=value".to_owned())
}

pub fn taint(text: &str) -> Result<(String, String, String), String> {
    let invalid =
        || "must be key[=value]:effect with effect NoSchedule, PreferNoSchedule or NoExecute".to_owned();
    let (what, effect) = text.rsplit_once(':').ok_or_else(invalid)?;
    let (name, value) = what.split_once('=').unwrap_or((what, ""));
    match effect {
        "NoSchedule" | "PreferNoSchedule" | "NoExecute" if !name.is_empty() => {
            Ok((name.into(), value.into(), effect.into()))
        }
        _ => Err(invalid()),
    }
}

/// A non-negative duration in Go's syntax: `90s`, `1h30m`.
pub fn duration(text: &str) -> Result<SignedDuration, String> {
    let parsed = api::time::parse_duration(text).ok().filter(|time| !time.is_negative());
    parsed.ok_or_else(|| "must be a duration such as 90s or 1h30m".to_owned())
}

pub fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("must be an octal file mode such as 600".to_owned()),
    }
}

pub fn port_range(text: &str) -> Result<PortRange, String> {
    let parsed = text.split_once('-').and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    match parsed {
        Some((low, high)) if 0 < low && low <= high => Ok(PortRange(low..=high)),
        _ => Err("must be a port range such as 30000-32767".to_owned()),
    }
}
