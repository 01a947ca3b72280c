//! The order in which nodes are filtered: round robin over zones, so that a sample of nodes covers all zones.
//! Counterpart of upstream's `nodeTree`.

use super::labels::Labels;
use super::node::NodeId;

/// Nodes by zone, zones in the order of their first node.
#[derive(Clone, Debug, Default)]
pub struct NodeOrder {
    zones: Vec<(String, Vec<NodeId>)>,
    /// The resulting order; rebuilt by `refresh`.
    nodes: Vec<NodeId>,
    stale: bool,
}

impl NodeOrder {
    /// Adds a node with these labels.
    pub fn add(&mut self, id: NodeId, labels: &Labels) {
        let zone = zone_key(labels);
        match self.zones.iter_mut().find(|(known, _)| *known == zone) {
            Some((_, nodes)) => nodes.push(id),
            None => self.zones.push((zone, vec![id])),
        }
        self.stale = true;
    }

    /// Removes a node that had these labels.
    pub fn remove(&mut self, id: NodeId, labels: &Labels) {
        let zone = zone_key(labels);
        let Some(at) = self.zones.iter().position(|(known, _)| *known == zone) else { return };
        self.zones[at].1.retain(|known| *known != id);
        if self.zones[at].1.is_empty() {
            self.zones.remove(at);
        }
        self.stale = true;
    }

    /// Moves a node whose labels changed to its new zone.
    pub fn update_labels(&mut self, id: NodeId, old: &Labels, new: &Labels) {
        if zone_key(old) != zone_key(new) {
            self.remove(id, old);
            self.add(id, new);
        }
    }

    /// Rebuilds the order if nodes changed.
    pub fn refresh(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        self.nodes.clear();
        let longest = self.zones.iter().map(|(_, nodes)| nodes.len()).max().unwrap_or_default();
        for round in 0..longest {
            let in_round = self.zones.iter().filter_map(|(_, nodes)| nodes.get(round));
            self.nodes.extend(in_round);
        }
    }

    /// All nodes in order, as of the last [`NodeOrder::refresh`].
    pub fn list(&self) -> &[NodeId] {
        &self.nodes
    }
}

/// The zone key of a node, as upstream's `GetZoneKey`. Beta labels take precedence.
fn zone_key(labels: &Labels) -> String {
    let get =
        |new: &str, old: &str| labels.get(old).or_else(|| labels.get(new)).unwrap_or_default().to_owned();
    let zone = get("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone");
    let region = get("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region");
    if zone.is_empty() && region.is_empty() { String::new() } else { format!("{region}:\0:{zone}") }
}
