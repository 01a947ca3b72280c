//! Computes the status of a resource quota. Does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::quota::{ScopeAttributes, resource_for};
use api::resources::ResourceList;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ResourceQuota, ResourceQuotaStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::Quantity;
use serde_json::Value;

/// Group and plural resource name.
pub type GroupResource = (String, String);

/// The usage of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectUsage {
    pub uses: ResourceList,
    pub attributes: ScopeAttributes,
    /// The usage from a later time on, for pods that stop counting when their deletion grace period ends.
    pub later_usage: Option<(Timestamp, ResourceList)>,
}

/// The kinds that some quota limits.
pub fn limited_resources(quotas: &[Arc<ResourceQuota>]) -> BTreeSet<GroupResource> {
    let names = quotas.iter().flat_map(|quota| hard_limits(quota).into_keys().collect::<Vec<_>>());
    names
        .filter_map(|name| resource_for(&name).map(|kind| (kind.group.to_owned(), kind.plural.to_owned())))
        .collect()
}

/// The hard limits of a quota.
pub fn hard_limits(quota: &ResourceQuota) -> BTreeMap<String, Text> {
    quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default()
}

/// The usage of a quota by the objects of kinds that are `known`, and when it changes without an event.
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
                // The first quantity determines the format of the sum.
                *sum = if sum.is_zero() { *quantity } else { *sum + *quantity };
            }
        }
    }
    (used, requeue_at)
}

fn read(list: &BTreeMap<String, Text>) -> ResourceList {
    list.iter().filter_map(|(name, text)| Some((name.clone(), Quantity::parse(&text.0).ok()?))).collect()
}

/// The usage in the status.
pub fn status_used(quota: &ResourceQuota) -> ResourceList {
    quota.status.as_ref().and_then(|status| status.used.as_ref()).map(read).unwrap_or_default()
}

/// Whether any quantity is lower.
pub fn any_less(list: &ResourceList, than: &ResourceList) -> bool {
    list.iter().any(|(name, quantity)| than.get(name).is_some_and(|other| quantity < other))
}

/// The quota with updated usage, or `None` if it is up to date.
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
