//! The results of a run: statistics over samples, comparison with a baseline and an earlier run, and
//! output.

use std::time::Duration;

use serde_json::{Map, Value, json};

/// The unit of a result. Higher is better for rates, lower for everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Nanos,
    Millis,
    PerSecond,
    MegabytesPerSecond,
    Megabytes,
    /// CPU time of the server per operation.
    CpuMicros,
    /// Requests to the API server.
    Requests,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Nanos => "ns",
            Unit::Millis => "ms",
            Unit::PerSecond => "/s",
            Unit::MegabytesPerSecond => "MB/s",
            Unit::Megabytes => "MB",
            Unit::CpuMicros => "us-cpu",
            Unit::Requests => "requests",
        }
    }
}

/// All results of a run, in the order of measurement.
#[derive(Default)]
pub struct Report {
    results: Vec<Measurement>,
    /// The results of an earlier run by name, for comparison.
    earlier: Map<String, Value>,
}

/// The target for a result: a maximum ratio to its baseline and a maximum value.
#[derive(Clone, Copy, Default)]
pub struct Threshold {
    pub ratio: Option<f64>,
    pub value: Option<f64>,
}

struct Measurement {
    name: String,
    unit: Unit,
    value: f64,
    /// The value divided by that of the baseline.
    ratio: Option<f64>,
    threshold: Threshold,
}

impl Report {
    /// Reads the output of an earlier run; the JSON on its last line counts.
    pub fn with_earlier_run(earlier: &str) -> anyhow::Result<Report> {
        let last: Value = serde_json::from_str(earlier.trim_end().lines().last().unwrap_or_default())?;
        Ok(Report { results: Vec::new(), earlier: last["figures"].as_object().cloned().unwrap_or_default() })
    }

    pub fn add(&mut self, name: impl Into<String>, unit: Unit, value: f64) {
        self.print(Measurement {
            name: name.into(),
            unit,
            value,
            ratio: None,
            threshold: Threshold::default(),
        });
    }

    /// Adds a result and its ratio to an earlier one of this run. Both come from the same machine and
    /// minute, so the ratio is more meaningful than the value.
    pub fn add_relative(&mut self, name: impl Into<String>, unit: Unit, value: f64, baseline: &str) {
        self.add_with_threshold(name, unit, value, baseline, Threshold::default());
    }

    /// The same with a threshold.
    pub fn add_with_threshold(
        &mut self,
        name: impl Into<String>,
        unit: Unit,
        value: f64,
        baseline: &str,
        threshold: Threshold,
    ) {
        let base = self
            .results
            .iter()
            .find(|measurement| measurement.name == baseline)
            .map(|measurement| measurement.value);
        let ratio = base.filter(|base| *base > 0.0).map(|base| value / base);
        self.print(Measurement { name: name.into(), unit, value, ratio, threshold });
    }

    fn print(&mut self, measurement: Measurement) {
        let Measurement { name, unit, value, ratio, threshold: goal } = &measurement;
        let mut line = format!("{name:<44} {:>12} {:<6}", format_number(*value), unit.name());
        if let Some(ratio) = ratio {
            line += &format!(" {:>8}x", format_number(*ratio));
        }
        let thresholds = [
            goal.ratio.map(|threshold| format!("{threshold}x")),
            goal.value.map(|threshold| format!("{threshold} {}", unit.name())),
        ];
        let thresholds: Vec<String> = thresholds.into_iter().flatten().collect();
        if !thresholds.is_empty() {
            line += &format!("   goal {}", thresholds.join(" and "));
        }
        if let Some(before) = self.earlier.get(name).and_then(|measurement| measurement["value"].as_f64()) {
            line += &format!("   was {} ({}x)", format_number(before), format_number(value / before));
        }
        println!("{}", line.trim_end());
        self.results.push(measurement);
    }

    /// All results as one JSON object, for programs.
    pub fn json(&self, about: Value) -> Value {
        let results: Map<String, Value> = self.results.iter().map(|f| (f.name.clone(), f.json())).collect();
        json!({"about": about, "figures": results})
    }
}

impl Measurement {
    fn json(&self) -> Value {
        let mut value = json!({"value": rounded(self.value), "unit": self.unit.name()});
        if let Some(ratio) = self.ratio {
            value["ratio"] = rounded(ratio).into();
        }
        value
    }
}

/// The median. Sorts the samples.
pub fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The smallest sample that is not exceeded by this share of the samples; 0 if there are none. Sorts
/// the samples.
pub fn quantile(samples: &mut [f64], fraction: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (samples.len() as f64 * fraction).ceil() as usize;
    samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Formats three significant digits, or two of a small number; the measurement is not more precise.
fn format_number(value: f64) -> String {
    let precision = match value {
        100.0.. => 0,
        10.0..100.0 => 1,
        0.1..10.0 => 2,
        _ => 4,
    };
    format!("{value:.precision$}")
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_returns_a_sample() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut samples, 0.99), 99.0);
        assert_eq!(quantile(&mut samples, 1.0), 100.0);
        assert_eq!(quantile(&mut [5.0], 0.01), 5.0);
    }

    #[test]
    fn formats_numbers_with_three_digits() {
        let formatted = [12345.6, 99.96, 7.0, 0.25, 0.0021].map(format_number);
        assert_eq!(formatted, ["12346", "100.0", "7.00", "0.25", "0.0021"]);
    }

    #[test]
    fn reports_ratio_to_baseline_and_reads_earlier_run() {
        let mut report = Report::with_earlier_run("words\n{\"figures\":{\"b\":{\"value\":3.0}}}\n").unwrap();
        report.add("a", Unit::Nanos, 4.0);
        report.add_relative("b", Unit::Nanos, 6.0, "a");
        report.add_relative("c", Unit::Nanos, 6.0, "none");
        let json = report.json(Value::Null);
        assert_eq!(json["figures"]["b"], json!({"value": 6.0, "unit": "ns", "ratio": 1.5}));
        assert_eq!(json["figures"]["c"], json!({"value": 6.0, "unit": "ns"}));
        assert!(Report::with_earlier_run("no JSON").is_err());
    }
}
