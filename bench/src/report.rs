//! Figures, how several runs of one become a median, and how they are shown.

use std::time::Duration;

use serde_json::{Map, Value, json};

/// What was measured. More is better for rates, less for everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Nanos,
    Millis,
    PerSecond,
    MegabytesPerSecond,
    Megabytes,
    /// Of the server's CPU, per operation.
    CpuMicros,
    /// Asked of the API server.
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

/// All figures of a run, in the order they were taken.
#[derive(Default)]
pub struct Report {
    figures: Vec<Figure>,
    /// The figures of an earlier run, by name, to show beside these.
    earlier: Map<String, Value>,
}

/// What a figure should come to: at most this share of its yardstick, at most this.
#[derive(Clone, Copy, Default)]
pub struct Goal {
    pub ratio: Option<f64>,
    pub value: Option<f64>,
}

struct Figure {
    name: String,
    unit: Unit,
    value: f64,
    /// The figure divided by that of its yardstick.
    ratio: Option<f64>,
    goal: Goal,
}

impl Report {
    /// Reads what an earlier run printed; its last line counts.
    pub fn beside(earlier: &str) -> anyhow::Result<Report> {
        let last: Value = serde_json::from_str(earlier.trim_end().lines().last().unwrap_or_default())?;
        Ok(Report { figures: Vec::new(), earlier: last["figures"].as_object().cloned().unwrap_or_default() })
    }

    pub fn add(&mut self, name: impl Into<String>, unit: Unit, value: f64) {
        self.show(Figure { name: name.into(), unit, value, ratio: None, goal: Goal::default() });
    }

    /// Adds a figure and how it compares with one taken before in this run. Both come from the same machine
    /// in the same minute, so the ratio says more than the figure.
    pub fn add_against(&mut self, name: impl Into<String>, unit: Unit, value: f64, yardstick: &str) {
        self.add_with_goal(name, unit, value, yardstick, Goal::default());
    }

    /// The same, with what it should come to beside it.
    pub fn add_with_goal(
        &mut self,
        name: impl Into<String>,
        unit: Unit,
        value: f64,
        yardstick: &str,
        goal: Goal,
    ) {
        let base = self.figures.iter().find(|figure| figure.name == yardstick).map(|figure| figure.value);
        let ratio = base.filter(|base| *base > 0.0).map(|base| value / base);
        self.show(Figure { name: name.into(), unit, value, ratio, goal });
    }

    fn show(&mut self, figure: Figure) {
        let Figure { name, unit, value, ratio, goal } = &figure;
        let mut line = format!("{name:<44} {:>12} {:<6}", shown(*value), unit.name());
        if let Some(ratio) = ratio {
            line += &format!(" {:>8}x", shown(*ratio));
        }
        let goals = [
            goal.ratio.map(|goal| format!("{goal}x")),
            goal.value.map(|goal| format!("{goal} {}", unit.name())),
        ];
        let goals: Vec<String> = goals.into_iter().flatten().collect();
        if !goals.is_empty() {
            line += &format!("   goal {}", goals.join(" and "));
        }
        if let Some(before) = self.earlier.get(name).and_then(|figure| figure["value"].as_f64()) {
            line += &format!("   was {} ({}x)", shown(before), shown(value / before));
        }
        println!("{}", line.trim_end());
        self.figures.push(figure);
    }

    /// Everything on one line, for programs.
    pub fn json(&self, about: Value) -> Value {
        let figures: Map<String, Value> = self.figures.iter().map(|f| (f.name.clone(), f.json())).collect();
        json!({"about": about, "figures": figures})
    }
}

impl Figure {
    fn json(&self) -> Value {
        let mut value = json!({"value": rounded(self.value), "unit": self.unit.name()});
        if let Some(ratio) = self.ratio {
            value["ratio"] = rounded(ratio).into();
        }
        value
    }
}

/// Sorts the samples and takes the middle one.
pub fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Sorts the samples and takes the one that this share of them does not exceed; 0 when there are none.
pub fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (samples.len() as f64 * share).ceil() as usize;
    samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Three digits, or two of a small number; the machine does not give more.
fn shown(value: f64) -> String {
    let decimals = match value {
        100.0.. => 0,
        10.0..100.0 => 1,
        0.1..10.0 => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
        let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut hundred, 0.99), 99.0);
        assert_eq!(quantile(&mut hundred, 1.0), 100.0);
        assert_eq!(quantile(&mut [5.0], 0.01), 5.0);
    }

    #[test]
    fn numbers_show_no_more_than_they_know() {
        let texts = [12345.6, 99.96, 7.0, 0.25, 0.0021].map(shown);
        assert_eq!(texts, ["12346", "100.0", "7.00", "0.25", "0.0021"]);
    }

    #[test]
    fn a_figure_stands_beside_its_yardstick_and_an_earlier_run() {
        let mut report = Report::beside("words\n{\"figures\":{\"b\":{\"value\":3.0}}}\n").unwrap();
        report.add("a", Unit::Nanos, 4.0);
        report.add_against("b", Unit::Nanos, 6.0, "a");
        report.add_against("c", Unit::Nanos, 6.0, "none");
        let json = report.json(Value::Null);
        assert_eq!(json["figures"]["b"], json!({"value": 6.0, "unit": "ns", "ratio": 1.5}));
        assert_eq!(json["figures"]["c"], json!({"value": 6.0, "unit": "ns"}));
        assert!(Report::beside("no JSON").is_err());
    }
}
