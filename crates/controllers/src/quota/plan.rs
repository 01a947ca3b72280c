//! What a quota's status should say. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::quota::{ScopeAttributes, resource_for};
use api::resources::ResourceList;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ResourceQuota, ResourceQuotaStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::Quantity;
use serde_json::Value;

/// A kind by group and plural.
pub type GroupResource = (String, String);

/// What one object uses.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectUsage {
    pub uses: ResourceList,
    pub attributes: ScopeAttributes,
    /// What it uses once its time has come, where it has one.
    pub later_usage: Option<(Timestamp, ResourceList)>,
}

/// The kinds that some quota limits.
pub fn limited_resources(quotas: &[Arc<ResourceQuota>]) -> BTreeSet<GroupResource> {
    let names = quotas.iter().flat_map(|quota| hard_limits(quota).into_keys().collect::<Vec<_>>());
    names
        .filter_map(|name| resource_for(&name).map(|kind| (kind.group.to_owned(), kind.plural.to_owned())))
        .collect()
}

/// What a quota limits.
pub fn hard_limits(quota: &ResourceQuota) -> BTreeMap<String, Text> {
    quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default()
}

/// What is used of what a quota limits, by objects of kinds that are `known`; and when to look again though nothing
/// changes.
pub fn count<'a>(
    quota: &ResourceQuota,
    known: &BTreeSet<GroupResource>,
    entries: impl Iterator<Item = &'a ObjectUsage>,
    now: Timestamp,
) -> (ResourceList, Option<Timestamp>) {
    let mut used: ResourceList = hard_limits(quota)
        .into_keys()
        .filter(|name| {
            resource_for(name)
                .is_some_and(|kind| known.contains(&(kind.group.to_owned(), kind.plural.to_owned())))
        })
        .map(|name| (name, Quantity::ZERO))
        .collect();
    let value = serde_json::to_value(quota).unwrap_or(Value::Null);
    let mut requeue_at: Option<Timestamp> = None;
    for entry in entries.filter(|entry| api::quota::matches(&value, &entry.attributes)) {
        let uses = match &entry.later_usage {
            Some((end, later_usage)) if *end <= now => later_usage,
            Some((end, _)) => {
                requeue_at = Some(requeue_at.map_or(*end, |other| other.min(*end)));
                &entry.uses
            }
            None => &entry.uses,
        };
        for (name, quantity) in uses {
            if let Some(sum) = used.get_mut(name) {
                // The first decides how the sum is printed.
                *sum = if sum.is_zero() { *quantity } else { *sum + *quantity };
            }
        }
    }
    (used, requeue_at)
}

fn read(list: &BTreeMap<String, Text>) -> ResourceList {
    list.iter().filter_map(|(name, text)| Some((name.clone(), Quantity::parse(&text.0).ok()?))).collect()
}

/// What a quota says is used of it.
pub fn status_used(quota: &ResourceQuota) -> ResourceList {
    quota.status.as_ref().and_then(|status| status.used.as_ref()).map(read).unwrap_or_default()
}

/// Whether there is less of anything.
pub fn any_less(list: &ResourceList, than: &ResourceList) -> bool {
    list.iter().any(|(name, quantity)| than.get(name).is_some_and(|other| quantity < other))
}

/// The quota with what is used of it, where it says something else.
pub fn updated_status(quota: &ResourceQuota, used: &ResourceList) -> Option<ResourceQuota> {
    let status = quota.status.clone().unwrap_or_default();
    let hard = hard_limits(quota);
    if read(&hard) == read(&status.hard.unwrap_or_default()) && self::status_used(quota) == *used {
        return None;
    }
    let text = |list: &ResourceList| {
        list.iter().map(|(name, quantity)| (name.clone(), Text(quantity.to_string()))).collect()
    };
    let status = ResourceQuotaStatus { hard: Some(hard), used: Some(text(used)) };
    Some(ResourceQuota { status: Some(status), ..quota.clone() })
}
