//! How long a pod may stay on a tainted node. Pure.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Taint, Toleration};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stay {
    Forever,
    /// From when the taints were noticed.
    For(Duration),
    Not,
}

/// The taints that pods which do not tolerate them have to leave for.
pub fn evicting(taints: &[Taint]) -> Vec<Taint> {
    taints.iter().filter(|taint| taint.effect == "NoExecute").cloned().collect()
}

pub fn stay(tolerations: &[Toleration], taints: &[Taint]) -> Stay {
    let mut shortest: Option<i64> = None;
    for taint in taints {
        let Some(toleration) = tolerations.iter().find(|toleration| tolerates(toleration, taint)) else {
            return Stay::Not;
        };
        if let Some(seconds) = toleration.toleration_seconds {
            shortest = Some(shortest.map_or(seconds, |shortest| shortest.min(seconds)));
        }
    }
    match shortest {
        None => Stay::Forever,
        Some(..=0) => Stay::Not,
        Some(seconds) => Stay::For(Duration::from_secs(seconds.unsigned_abs())),
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let meant = (effect.is_empty() || effect == taint.effect) && (key.is_empty() || key == taint.key);
    match toleration.operator.as_deref() {
        None | Some("" | "Equal") => meant && text(&toleration.value) == text(&taint.value),
        Some("Exists") => meant,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `key=value:seconds`, `key:` or `:` for a toleration.
    #[track_caller]
    fn check(tolerations: &[&str], taints: &[&str], expected: Stay) {
        let tolerations: Vec<Toleration> = tolerations
            .iter()
            .map(|text| {
                let (what, seconds) = text.split_once(':').expect("seconds after a colon");
                let (key, value) =
                    what.split_once('=').map_or((what, None), |(key, value)| (key, Some(value)));
                Toleration {
                    key: Some(key.to_owned()),
                    operator: Some(if value.is_some() { "Equal" } else { "Exists" }.into()),
                    value: value.map(str::to_owned),
                    effect: Some("NoExecute".into()),
                    toleration_seconds: seconds.parse().ok(),
                }
            })
            .collect();
        let taint = |text: &&str| {
            let (key, value) = text.split_once('=').unwrap_or((text, ""));
            Taint { key: key.into(), value: Some(value.into()), effect: "NoExecute".into(), time_added: None }
        };
        assert_eq!(stay(&tolerations, &taints.iter().map(taint).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn the_shortest_toleration_counts() {
        let seconds = |seconds| Stay::For(Duration::from_secs(seconds));
        check(&[], &[], Stay::Forever);
        check(&[], &["a"], Stay::Not);
        check(&["a:"], &["a"], Stay::Forever);
        check(&[":"], &["a", "b"], Stay::Forever);
        check(&["a:"], &["a", "b"], Stay::Not);
        check(&["a:300", "b:20"], &["a", "b"], seconds(20));
        check(&["a:300", "b:"], &["a", "b"], seconds(300));
        check(&["a:0"], &["a"], Stay::Not);
        check(&["a:-5"], &["a"], Stay::Not);
        check(&["a=x:"], &["a=x"], Stay::Forever);
        check(&["a=x:"], &["a=y"], Stay::Not);
        // The first that fits counts.
        check(&["a:10", "a:5"], &["a"], seconds(10));
    }

    proptest! {
        /// Another taint never lets a pod stay longer.
        #[test]
        fn more_taints_are_never_better(
            tolerated in prop::collection::btree_map(0..4u8, prop::option::of(0..100i64), 0..4),
            taints in prop::collection::vec(0..4u8, 0..4),
            another in 0..4u8,
        ) {
            let key = |number: u8| format!("k{number}");
            let tolerations: Vec<Toleration> = tolerated
                .iter()
                .map(|(number, seconds)| Toleration {
                    key: Some(key(*number)),
                    operator: Some("Exists".into()),
                    toleration_seconds: *seconds,
                    ..Toleration::default()
                })
                .collect();
            let taint = |number: &u8| Taint { key: key(*number), effect: "NoExecute".into(), ..Taint::default() };
            let mut there: Vec<Taint> = taints.iter().map(taint).collect();
            let time = |stay: Stay| match stay {
                Stay::Forever => Duration::MAX,
                Stay::For(time) => time,
                Stay::Not => Duration::ZERO,
            };
            let before = time(stay(&tolerations, &there));
            there.push(taint(&another));
            prop_assert!(time(stay(&tolerations, &there)) <= before);
        }
    }
}
