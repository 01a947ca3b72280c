//! Computes how long a pod may stay on a tainted node. Does no I/O.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Taint, Toleration};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TolerationTime {
    Forever,
    /// Counts from when the controller noticed the taints.
    For(Duration),
    Not,
}

/// The taints that evict pods.
pub fn no_execute_taints(taints: &[Taint]) -> Vec<Taint> {
    taints.iter().filter(|taint| taint.effect == "NoExecute").cloned().collect()
}

pub fn min_toleration_time(tolerations: &[Toleration], taints: &[Taint]) -> TolerationTime {
    let mut shortest: Option<i64> = None;
    for taint in taints {
        let Some(toleration) = tolerations.iter().find(|toleration| tolerates(toleration, taint)) else {
            return TolerationTime::Not;
        };
        if let Some(seconds) = toleration.toleration_seconds {
            shortest = Some(shortest.map_or(seconds, |shortest| shortest.min(seconds)));
        }
    }
    match shortest {
        None => TolerationTime::Forever,
        Some(..=0) => TolerationTime::Not,
        Some(seconds) => TolerationTime::For(Duration::from_secs(seconds.unsigned_abs())),
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let matches_key_and_effect =
        (effect.is_empty() || effect == taint.effect) && (key.is_empty() || key == taint.key);
    match toleration.operator.as_deref() {
        None | Some("" | "Equal") => matches_key_and_effect && text(&toleration.value) == text(&taint.value),
        Some("Exists") => matches_key_and_effect,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tolerations are given as `key=value:seconds`, `key:` or `:`.
    #[track_caller]
    fn check(tolerations: &[&str], taints: &[&str], expected: TolerationTime) {
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
        assert_eq!(
            min_toleration_time(&tolerations, &taints.iter().map(taint).collect::<Vec<_>>()),
            expected
        );
    }

    #[test]
    fn shortest_toleration_wins() {
        let seconds = |seconds| TolerationTime::For(Duration::from_secs(seconds));
        check(&[], &[], TolerationTime::Forever);
        check(&[], &["a"], TolerationTime::Not);
        check(&["a:"], &["a"], TolerationTime::Forever);
        check(&[":"], &["a", "b"], TolerationTime::Forever);
        check(&["a:"], &["a", "b"], TolerationTime::Not);
        check(&["a:300", "b:20"], &["a", "b"], seconds(20));
        check(&["a:300", "b:"], &["a", "b"], seconds(300));
        check(&["a:0"], &["a"], TolerationTime::Not);
        check(&["a:-5"], &["a"], TolerationTime::Not);
        check(&["a=x:"], &["a=x"], TolerationTime::Forever);
        check(&["a=x:"], &["a=y"], TolerationTime::Not);
        // The first matching toleration counts, not the shortest.
        check(&["a:10", "a:5"], &["a"], seconds(10));
    }

    proptest! {
        /// An additional taint never extends the toleration time.
        #[test]
        fn more_taints_never_extend_toleration_time(
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
            let time = |stay: TolerationTime| match stay {
                TolerationTime::Forever => Duration::MAX,
                TolerationTime::For(time) => time,
                TolerationTime::Not => Duration::ZERO,
            };
            let before = time(min_toleration_time(&tolerations, &there));
            there.push(taint(&another));
            prop_assert!(time(min_toleration_time(&tolerations, &there)) <= before);
        }
    }
}
