//! Accessors of timestamps and durations.

use jiff::Zoned;
use jiff::tz::{Offset, TimeZone};

use super::{FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::Value;

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "getFullYear" => |_, args| time_field(args, |time| time.year().into(), |_| None),
        "getMonth" => |_, args| time_field(args, |time| i64::from(time.month()) - 1, |_| None),
        "getDayOfYear" => |_, args| time_field(args, |time| i64::from(time.day_of_year()) - 1, |_| None),
        "getDayOfMonth" => |_, args| time_field(args, |time| i64::from(time.day()) - 1, |_| None),
        "getDate" => |_, args| time_field(args, |time| time.day().into(), |_| None),
        "getDayOfWeek" => {
            |_, args| time_field(args, |time| time.weekday().to_sunday_zero_offset().into(), |_| None)
        }
        "getHours" => {
            |_, args| time_field(args, |time| time.hour().into(), |nanos| Some(nanos / 3_600_000_000_000))
        }
        "getMinutes" => {
            |_, args| time_field(args, |time| time.minute().into(), |nanos| Some(nanos / 60_000_000_000))
        }
        "getSeconds" => {
            |_, args| time_field(args, |time| time.second().into(), |nanos| Some(nanos / 1_000_000_000))
        }
        "getMilliseconds" => {
            |_, args| time_field(args, |time| time.millisecond().into(), |nanos| Some(nanos / 1_000_000))
        }
        _ => return None,
    })
}

fn time_field<'a>(
    args: &[Value<'a>],
    of_time: impl Fn(&Zoned) -> i64,
    of_duration: impl Fn(i64) -> Option<i64>,
) -> EvalResult<'a> {
    let (timestamp, zone) = match args {
        [Value::Duration(nanos)] => {
            return of_duration(*nanos).map_or_else(overload_error, |value| Ok(Value::Int(value)));
        }
        [Value::Timestamp(timestamp)] => (timestamp, TimeZone::UTC),
        [Value::Timestamp(timestamp), Value::String(name)] => (timestamp, zone(name)?),
        _ => return overload_error(),
    };
    Ok(Value::Int(of_time(&timestamp.to_zoned(zone))))
}

/// Parses a time zone name or an offset such as `-08:00`.
fn zone(name: &str) -> Result<TimeZone, EvalError> {
    let unknown = || EvalError::new(format!("unknown time zone {name}"));
    let Some((hours, minutes)) = name.split_once(':') else {
        return if name.is_empty() { Ok(TimeZone::UTC) } else { TimeZone::get(name).map_err(|_| unknown()) };
    };
    let negative = hours.starts_with('-');
    let hours: i32 = hours.trim_start_matches(['+', '-']).parse().map_err(|_| unknown())?;
    let minutes: i32 = minutes.parse().map_err(|_| unknown())?;
    if hours > 23 || !(0..60).contains(&minutes) {
        return Err(unknown());
    }
    let seconds = hours * 3600 + minutes * 60;
    let offset = Offset::from_seconds(if negative { -seconds } else { seconds }).map_err(|_| unknown())?;
    Ok(TimeZone::fixed(offset))
}
